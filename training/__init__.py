"""The training of the embedded model: text, tokenizer, windows, network, loop. Not installed."""
