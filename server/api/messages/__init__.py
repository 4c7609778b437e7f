"""Anthropic's /v1/messages: its bodies, its blocks as messages, its answers, its errors.

May import: server/api.
"""
