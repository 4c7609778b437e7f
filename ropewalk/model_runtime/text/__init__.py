"""Tokens, chat templates and grammars."""
