"""The routes of conversations: chat, responses, messages, and the tools of all three."""
