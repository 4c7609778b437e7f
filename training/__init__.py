"""How the embedded model is made: text, tokenizer, windows, network, loop. Not installed."""
