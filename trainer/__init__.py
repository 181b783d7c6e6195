"""accel-train starts training processes with the right slots and GPUs attached to them.

    cli        what a person can type
    job        what will be run: the command, and all that is attached to it
    launch     the job's process: started, signalled, waited for
    sandbox    the slots of a job: mounted, and found by it
    gpus       the GPUs of a job
    errors     what stops a job before it starts
    demo       the whole path on a real image set, in one command

`cli` uses `job` and `launch`; `job` uses `sandbox` and `gpus`.  Of accelfs only the client module
`accelfs.clients.slots` and the mount path are used, and TensorFlow is never imported: it belongs to
the job.
"""
