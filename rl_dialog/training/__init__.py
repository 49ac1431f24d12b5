"""The training loop, its optimizer and its log."""
