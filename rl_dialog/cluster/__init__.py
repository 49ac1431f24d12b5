"""Everything that runs on Ray: the only package, with `pipelines`, that imports it."""
