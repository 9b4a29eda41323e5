// Shortest paths over a time-expanded network, as a C ABI that Python binds. jaxcoll/synth/pricing.py holds the
// method's explanation and the same method in numpy; both give the same trees.
//
// One step: the arcs into switches until nothing improves, then the arcs into ranks once. A path takes at most `steps`
// steps, and of equal paths the one with fewer is kept.
#ifndef JAXCOLL_FLOW_PATHS_H_
#define JAXCOLL_FLOW_PATHS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct jc_paths jc_paths;              // a network
typedef struct jc_paths_trees jc_paths_trees;  // trees grown on one; they don't need it any more

// Ranks are nodes 0..ranks-1, switches follow. NULL when an end lies outside 0..nodes-1 or memory is short.
jc_paths* jc_paths_new(int32_t ranks, int32_t nodes, int32_t arcs, const int32_t* tail, const int32_t* head);
void jc_paths_free(jc_paths* paths);

// A tree from each of `count` sources. Arc a costs tree i weight[a] + scale[a] * noise[offset[i] + a], or weight[a]
// where offset is NULL; weights are >= 0, and infinite ones forbid an arc. want: NULL, or for tree i the nodes
// want[want_start[i]] .. want[want_start[i+1]] to which alone paths are asked for; the others may then have none.
// NULL for arguments out of range or too little memory.
jc_paths_trees* jc_paths_grow(jc_paths* paths, int32_t steps, const double* weight, int32_t count,
                              const int32_t* source, const double* scale, const double* noise, const int64_t* offset,
                              const int64_t* want_start, const int32_t* want);
void jc_paths_trees_free(jc_paths_trees* trees);

// dist[count][nodes], infinite where there is no path.
void jc_paths_dist(const jc_paths_trees* trees, double* dist);

// The trees as loads of arcs: one unit goes from each source to every other rank. jc_paths_loads makes them and says
// how many entries they have (-1: too little memory); jc_paths_loads_take gives them: start[count + 1], arc and units
// by tree and by arc.
int64_t jc_paths_loads(jc_paths_trees* trees);
void jc_paths_loads_take(const jc_paths_trees* trees, int64_t* start, int64_t* arc, double* units);

// Hops of the longest of `count` paths: path i goes from the source of tree[i] to the node dest[i]. -1 for arguments
// out of range.
int32_t jc_paths_longest(const jc_paths_trees* trees, int64_t count, const int64_t* tree, const int64_t* dest);
// Their arcs, path[count][width], from the source on; what is left of a row stays as it was.
void jc_paths_take(const jc_paths_trees* trees, int64_t count, const int64_t* tree, const int64_t* dest, int32_t width,
                   int32_t* path);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif  // JAXCOLL_FLOW_PATHS_H_
