"""Tool calls and reasoning in the text of a chat: formats, prompts, grammars, reading.

May import: text. tests/test_layout.py checks it.
"""
