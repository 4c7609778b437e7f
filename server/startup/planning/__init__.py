"""Parts of a serving plan: context buckets, chat templates, and formats that fit the memory."""
