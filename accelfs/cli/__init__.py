"""What can an operator type?  One module a noun: parse, call, print."""
