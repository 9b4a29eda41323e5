"""`jaxcoll bench`: nccl-tests' table and definitions, with peers timed in turn in the same run.

`definitions` says what is measured, `worker` and `mpi_worker` run it in the ranks, `groups` starts and drives them,
`table` prints, `cli` ties them together.
"""
