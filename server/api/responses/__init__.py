"""OpenAI's /v1/responses, without a store: its bodies, its items as messages, its answers.

May import: server/api.
"""
