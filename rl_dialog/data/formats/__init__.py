"""The log formats, one family per file; `rl_dialog/data/readers.py` chooses among them.

Every format module has three functions:

    matches(head)                    does the file's beginning look like mine?
    corpus(head)                     the published corpus it belongs to, or None for a log of the user's own
    read(log, *, max_line_bytes)     Dialogs, and a Bad for every record that is not one

The way of a record: `log_file.py` opens and cuts the bytes, `json_stream.py` and `records.py` make parsed
records of them, a format turns each record into Dialogs. The unit of quarantine is the dialog: one unreadable
turn would leave a conversation with a hole, so the whole conversation goes to quarantine and the reason names
the turn.
"""
