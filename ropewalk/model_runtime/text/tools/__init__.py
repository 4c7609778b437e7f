"""Tool calls and reasoning in the text of a chat: formats, prompts, grammars, reading."""
