"""Speed and memory on this machine: a file for each thing that is measured; __main__.py is the command."""
