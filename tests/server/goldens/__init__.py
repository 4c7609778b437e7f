"""What eval, inspect and bench print and write, kept as files beside this one."""
