"""How do bytes come and go?

`protocol` is the one interface, `posix` a directory that fulfils it, `layout` the names of everything
that a store holds.  Only this layer knows transient from permanent errors.
"""
