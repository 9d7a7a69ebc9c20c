"""The commands `tpsgd adapt` and `tpsgd search`, which load torch only when they are called."""
