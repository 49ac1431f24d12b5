"""The one exception that is a message to people."""


class UserError(ValueError):
    """Something that who runs the program can repair: the message says what was expected, what came, where,
    and how to fix it. Any other exception is a defect of ours and shows its traceback."""
