/* The C interface of libjaxcoll: what Python binds with cffi. (The XLA FFI handlers are exported beside it and
 * registered by address.)
 *
 * Conventions: functions that can fail return 0 (or a handle >= 0) for success and -1 for failure; jc_last_error() then
 * tells why, on the same thread. Nothing here throws. Nothing blocks except jc_op_wait and jc_gpu_wait (bounded by
 * their time-outs), jc_world_stop, and what connects GPUs (bounded by the world's time-out).
 */
#ifndef JAXCOLL_JAXCOLL_H_
#define JAXCOLL_JAXCOLL_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define JC_API_VERSION 3

typedef struct jc_world jc_world;
typedef struct jc_op jc_op;
typedef struct jc_fake jc_fake;

typedef struct {
  int64_t timeout_ns, warn_ns, mismatch_ns, spin_ns;
  int32_t helpers;
  int32_t record, threads;
  int32_t quiet;                                  /* 1: late ranks are not logged; failures are */
  int32_t keep_memory;                            /* 1: malloc keeps freed memory, in this whole process */
  int64_t lane_bytes, landing_bytes, early_bytes; /* 0: the default */
} jc_options;

#pragma GCC visibility push(default)
const char* jc_version(void);
int jc_api_version(void);
const char* jc_last_error(void);
void jc_set_log(void (*log)(const char* message));

/* A world: the processes, which devices each drives, and how they are joined. */
jc_world* jc_world_create(const jc_options* options, int processes, int me);
int jc_world_add_devices(jc_world* w, int process, const int64_t* devices, int count);
size_t jc_shm_segment_bytes(int places);
int jc_world_shm_create(jc_world* w, int fd, int places, int place);
int jc_world_shm_peer(jc_world* w, int process, int fd, int place, int pid, int allow_read);
int jc_world_tcp_peer(jc_world* w, int process, const int* fds, int count, int carries_data);
int jc_world_fake_peer(jc_world* w, jc_fake* net, int process);
int jc_world_start(jc_world* w);
void jc_world_stop(jc_world* w);
void jc_world_free(jc_world* w);
const char* jc_world_link_name(jc_world* w, int process);
int64_t jc_world_open_operations(jc_world* w);
int jc_world_sending(jc_world* w);           /* a process that has yet to take what was sent to it, -1: none */
int64_t jc_world_failures(jc_world* w);      /* executions that have failed here */
int jc_world_peer(jc_world* w, int process); /* 0 there, 1 has left in order, 2 lost */
int jc_world_pump(jc_world* w);              /* without threads: one round of work */
void jc_world_tick(jc_world* w);
void jc_world_use(jc_world* w); /* the world of the XLA handlers */

jc_fake* jc_fake_create(uint64_t seed, int can_read);
int jc_fake_step(jc_fake* net);
void jc_fake_kill(jc_fake* net, int process);
void jc_fake_free(jc_fake* net);

/* Programs and schedule sets. */
int64_t jc_program_load(jc_world* w, const uint8_t* bytes, size_t size);
int jc_program_check(const uint8_t* bytes, size_t size, const uint8_t* table, size_t table_size);
/* The set of one communicator, named by its devices in the order of ranks. Defining it again changes nothing. */
int jc_set_define(jc_world* w, int64_t set_key, const int64_t* devices, int ranks, const int64_t* programs, int count,
                  int chosen);
uint64_t jc_group_id(const int64_t* devices, int count);

/* Tables: staged, proposed, decided (communicator/schedule_set.h). Groups are named by their devices' id. */
int jc_set_stage(jc_world* w, uint64_t group, int64_t set_key, uint64_t version, int64_t program, const uint8_t* table,
                 size_t size);
int jc_set_started(jc_world* w, uint64_t group, int64_t set_key, uint64_t* sites, int64_t* launches, uint32_t* indices,
                   int max);
int jc_set_propose(jc_world* w, uint64_t group, int64_t set_key, uint64_t version, const uint64_t* sites,
                   const int64_t* launches, const uint32_t* indices, int count);
int jc_set_decide(jc_world* w, uint64_t group, int64_t set_key, uint64_t version, int commit);
int64_t jc_set_version(jc_world* w, uint64_t group, int64_t set_key);
int64_t jc_set_waiting(jc_world* w, uint64_t group, int64_t set_key);
/* Nanoseconds for which the last proposal and its verdict have held the lock that a beginning execution takes. */
int64_t jc_set_held(jc_world* w, uint64_t group, int64_t set_key);

/* An operation without XLA (tests, benchmarks). Leaf i has counts[i] elements a block. */
jc_op* jc_op_start(jc_world* w, int64_t device, int64_t launch, int32_t kind, int32_t reduce, int32_t dtype,
                   int64_t site, int64_t set_key, const int64_t* devices, int32_t group_size, int32_t groups,
                   int leaves, void* const* inputs, void* const* outputs, const int64_t* counts);
int jc_op_wait(jc_op* op, int64_t timeout_ns); /* 0 done, -1 failed, 1 not yet */
void jc_op_free(jc_op* op);

/* Records (80 bytes each, telemetry/record.h). The callback comes from whichever thread filled the buffer to
 * `threshold`, and must only wake somebody. */
int64_t jc_records_drain(jc_world* w, void* out, int64_t max, uint64_t* dropped);
void jc_records_enable(jc_world* w, int on);
/* One execution in `stride` is recorded, the same ones on every rank (a hash of launch and index decides). */
void jc_records_sample(jc_world* w, uint32_t stride);
void jc_records_notify(jc_world* w, void (*wake)(void*), void* arg, int64_t threshold);

/* Reduces n elements of `count` sources (tests). */
int jc_combine(int32_t dtype, int32_t reduce, void* dst, int dst_wide, const void* const* sources, const int* wide,
               int count, size_t n);

/* GPUs: CUDA and NCCL opened at run time (gpu/api.h), communicators over them, operations without XLA (tests,
 * measurements). */
typedef struct jc_gpu jc_gpu;
typedef struct jc_gpu_team jc_gpu_team;

typedef struct {
  int64_t timeout_ns;
  int32_t pairs, record, max_streams, max_ctas; /* gpu/team.h, Options */
  const int32_t* hosts;                         /* [ranks] of its host a number; NULL: no calls inside hosts */
} jc_gpu_options;

jc_gpu* jc_gpu_open(const char* library, const char* const* folders,
                    int count);                  /* library: one file that holds all, or "" to search */
void jc_gpu_close(jc_gpu* gpu);                  /* after its teams */
const char* jc_gpu_versions(jc_gpu* gpu);        /* a line for each library: version and path */
int jc_gpu_unique_id(jc_gpu* gpu, uint8_t* out); /* 128 bytes: one rank makes it, all pass it to jc_gpu_join */
/* Joins the local ranks of a communicator; every process of it calls this. Blocks until all are there, within the
 * time-out. */
jc_gpu_team* jc_gpu_join(jc_gpu* gpu, const jc_gpu_options* options, uint64_t id, const char* name, int ranks,
                         const int* local, const int* devices, int count, const uint8_t* unique_id);
void jc_gpu_leave(jc_gpu_team* team); /* when its operations are over */
/* Connects what a program needs under a table (size 0: identity) on every rank, in one order; returns a handle. *made:
 * new communicators. */
int64_t jc_gpu_program(jc_gpu_team* team, const uint8_t* bytes, size_t size, const uint8_t* table, size_t table_size,
                       int* made);
int jc_gpu_enqueue(jc_gpu_team* team, int64_t program, int rank, int64_t launch, int64_t site, uint32_t index,
                   int32_t reduce, int32_t dtype, int leaves, void* const* inputs, void* const* outputs,
                   const int64_t* counts, void* stream);
int jc_gpu_wait(jc_gpu_team* team, int64_t timeout_ns); /* 0 all over, -1 failed, 1 not yet */
void jc_gpu_fail(jc_gpu_team* team, const char* why);   /* another process has failed */
/* The same for the XLA handlers: a world's communicators, named by their devices. ordinals: the CUDA devices of the
 * local ranks. */
int jc_world_gpu_join(jc_world* w, jc_gpu* gpu, const jc_gpu_options* options, const int64_t* devices, int ranks,
                      const int* ordinals, int count, const uint8_t* unique_id);
int jc_world_gpu_connect(jc_world* w, uint64_t group, int64_t set_key); /* returns how many communicators were made */
/* Whether a communicator's GPU side has failed (1); why, into `out`. Joining again, with a new id, makes a new one. */
int jc_world_gpu_failed(jc_world* w, uint64_t group, char* out, int64_t size);
int jc_world_gpu_enqueue(jc_world* w, int64_t device, int64_t launch, int32_t kind, int32_t reduce, int32_t dtype,
                         int64_t site, int64_t set_key, const int64_t* devices, int32_t group_size, int32_t groups,
                         int leaves, void* const* inputs, void* const* outputs, const int64_t* counts, void* stream);
int64_t jc_gpu_records_drain(jc_gpu* gpu, void* out, int64_t max, uint64_t* dropped);
void jc_gpu_records_sample(jc_gpu* gpu, uint32_t stride);
void jc_gpu_records_notify(jc_gpu* gpu, void (*wake)(void*), void* arg, int64_t threshold);
const char* jc_gpu_combine_source(void); /* the text of the reduction kernel */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif /* JAXCOLL_JAXCOLL_H_ */
