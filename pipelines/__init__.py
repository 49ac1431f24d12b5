"""The commands: `python -m pipelines.<verb> --help`."""

import gc
import sys

# While `python -m pipelines.VERB` imports torch, transformers and Ray, nothing becomes garbage, and looking
# for it takes a quarter of a verb's start. `rl_dialog/run.py: run` begins to collect. argv is "-m" as long as
# Python looks for the module to run: not where a worker, a test or a notebook imports it.
if sys.argv[:1] == ["-m"]:
    gc.disable()
