"""The routes of the page to try a model in a browser, and the JSON that it draws from.

It may import page, api, corpus, settings and the root.
"""
