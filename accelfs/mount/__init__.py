"""How does a tree become a kernel mount?

A master mounts and keeps the connection; forked workers serve it, each on its own clone of the device.

    loop         pyfuse3 without an event loop        operations   pyfuse3's handlers over dataset/tree
    device       /dev/fuse: INIT, clones, RESEND      worker       one serving process
    mountpoint   may we mount here, and unmounting    master       start, restart, readiness, end
    state        which mounts does this node have

Concurrency: every process is single-threaded and sync.
"""
