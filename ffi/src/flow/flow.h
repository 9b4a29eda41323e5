// Minimum cuts for tree packing, as a C ABI that Python binds.
//
// Words: a *demand* is how much each node must send to everybody (an arc from one super source to the node); a *group*
// is a demand that any of several nodes can serve (a tree that has grown to those nodes). A *target* must receive all
// demands. Capacities and demands are non-negative int64 and their sums must stay below JC_FLOW_INFINITE.
#ifndef JAXCOLL_FLOW_FLOW_H_
#define JAXCOLL_FLOW_FLOW_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define JC_FLOW_ABI 3
#define JC_FLOW_INFINITE (INT64_C(1) << 60)

typedef struct jc_flow jc_flow;

// The version of this interface, fluid.h, pack.h and paths.h included, to compare with JC_FLOW_ABI.
int32_t jc_flow_abi(void);

// A network of `nodes` nodes and `arcs` directed arcs; NULL when an end lies outside 0..nodes-1 or memory is short.
jc_flow* jc_flow_new(int32_t nodes, int32_t arcs, const int32_t* tail, const int32_t* head);
void jc_flow_free(jc_flow* flow);

// Finds targets t for which the maximum flow from {all demands and groups} + `sources` (unlimited) to {t} + `sinks`
// stays below `limit`; with no targets, checks `sinks` alone. Stops after `max_cuts` of them.
//   capacity[arcs], demand[nodes]; group g has group_amount[g], nodes group_nodes[group_start[g] .. group_start[g+1]).
//   value[max_cuts]: the flow; target[max_cuts]: t (-1 without targets);
//   side[max_cuts][nodes]: bit 0 set for the smallest sink side of a minimum cut, bit 1 for the largest.
// Returns how many were found (0: every target receives `limit`), or -1 for arguments out of range.
int32_t jc_flow_cuts(jc_flow* flow, const int64_t* capacity, const int64_t* demand, int32_t groups,
                     const int64_t* group_amount, const int32_t* group_start, const int32_t* group_nodes,
                     int32_t nsources, const int32_t* sources, int32_t nsinks, const int32_t* sinks, int32_t ntargets,
                     const int32_t* targets, int64_t limit, int32_t max_cuts, int64_t* value, int32_t* target,
                     uint8_t* side);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif  // JAXCOLL_FLOW_FLOW_H_
