"""Small text worlds with players of mixed skill, to measure offline learning on."""
