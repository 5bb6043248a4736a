"""What a model is, as data: the families' table, a block's fields, and all that is read from a ``config.json``."""
