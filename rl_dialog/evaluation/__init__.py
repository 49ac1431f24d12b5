"""How good is a policy? Replies and rollouts, scores on held-out logs, intervals, reports. README.md defines
every figure."""
