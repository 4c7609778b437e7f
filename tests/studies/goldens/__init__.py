"""The outputs of eval, inspect and bench, kept as files beside this one."""
