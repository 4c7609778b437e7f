"""The playground's own files, which are served before anything heavy is imported.

It may import settings and the root. The files are in `assets/` and need no build.
"""
