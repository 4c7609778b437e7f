"""Parts of a serving plan: windows, context buckets, chat templates, formats that fit."""
