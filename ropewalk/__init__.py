"""Ropewalk: an inference server for models with rotary positions, past their trained length.

The packages are symbolic links to the folders at the top of the repository, so that everything has
one import name and a wheel installs one folder.
"""
