"""The commands: `python -m pipelines.<verb> --help`."""
