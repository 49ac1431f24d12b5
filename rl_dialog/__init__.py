"""rl_dialog: better dialog policies from logged conversations and human preferences."""
