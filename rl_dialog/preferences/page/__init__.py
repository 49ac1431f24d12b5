"""The page on which people compare segments, and the live page of a run."""
