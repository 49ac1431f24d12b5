"""Dialogs in, batches out: schema -> readers -> splits -> tokenize -> batch."""
