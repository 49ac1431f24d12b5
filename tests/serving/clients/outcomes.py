"""What the scripts beside this one send, and how they say what came of it."""

TALK = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "long " * 2000}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def attempt(call):
    """ "yes", "no", or the name and the text of the client's error."""
    try:
        return "yes" if call() else "no"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
