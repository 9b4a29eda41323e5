// The flow-level simulation of executions, as a C ABI that Python binds. jaxcoll/sim/fluid.py holds the model's
// explanation and the same model in numpy, which runs where this library isn't; both give the same times.
#ifndef JAXCOLL_FLOW_FLUID_H_
#define JAXCOLL_FLOW_FLUID_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// Executions ("jobs") side by side, which share nothing. What belongs to job j lies from start[j] to start[j + 1].
typedef struct jc_fluid {
  int32_t jobs, hops, timed;
  const int64_t *edge_start, *dep_start, *stranger_start, *resource_start;  // [jobs + 1]
  // [edges of all jobs, then strangers of all][hops]: resources, of the same job; all that is not below
  // resource_start[jobs] is no limit.
  const int64_t* path;
  const double* capacity;                        // [resources], bytes/s
  const double* lag;                             // [jobs], 1 / lanes
  const double *size, *alpha;                    // [edges], bytes and seconds
  const double* gate;                            // [edges], seconds: both ends are there
  const int64_t* connection;                     // [edges], 0 .. edges of all jobs - 1
  const int64_t *child, *parent;                 // [dependencies], edges of the same job
  const double *stranger_weight, *stranger_cap;  // [strangers]
  // [edges] Results, seconds; `ready` holds when the sender arrives and is raised. See Result in fluid.py.
  double *ready, *start, *end, *busy;
} jc_fluid;

// 0; 1: an edge can never start (or never end); -1: arguments out of range or too little memory.
int32_t jc_fluid_run(const jc_fluid* jobs);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif  // JAXCOLL_FLOW_FLUID_H_
