// Packing spanning trees into a capacitated graph, as a C ABI that Python binds. jaxcoll/synth/trees.py holds the
// method's explanation and the same method in Python; both give the same trees.
#ifndef JAXCOLL_FLOW_PACK_H_
#define JAXCOLL_FLOW_PACK_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct jc_pack jc_pack;

// Called now and then with the share done (0..1); a non-zero answer cancels.
typedef int32_t (*jc_pack_tick)(double done);

enum {
  JC_PACK_DONE = 0,
  JC_PACK_STUCK = 1,  // the orders don't fit
  JC_PACK_CANCELLED = 2,
  JC_PACK_BAD = -1,  // arguments out of range, or too little memory
};

// arcs sorted by (tail, head), no doubles; cuts: `ncuts` rows of (ranks + 7) / 8 bytes, lowest bit first; max_depth -1:
// any depth. NULL on arguments out of range.
jc_pack* jc_pack_new(int32_t ranks, int32_t arcs, const int32_t* tail, const int32_t* head, const int64_t* capacity,
                     int32_t ncuts, const uint8_t* cuts, int32_t max_depth);
void jc_pack_free(jc_pack* pack);

// Grows count[i] trees out of root[i] for every order i, along the edges hint_start[i] .. hint_start[i+1] of
// hint_tail/hint_head (parents before children) where possible.
int32_t jc_pack_run(jc_pack* pack, int32_t orders, const int32_t* root, const int64_t* count, const int32_t* hint_start,
                    const int32_t* hint_tail, const int32_t* hint_head, jc_pack_tick tick);

// stats: trees, cuts known (the given ones first), flow checks, roll-backs, orders grown again, orders complete (after
// JC_PACK_STUCK: fewer than there were).
void jc_pack_stats(const jc_pack* pack, int64_t stats[6]);

// root[trees], count[trees], tail/head[trees * (ranks - 1)], cuts[cuts known * ((ranks + 7) / 8)].
void jc_pack_take(const jc_pack* pack, int32_t* root, int64_t* count, int32_t* tail, int32_t* head, uint8_t* cuts);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif  // JAXCOLL_FLOW_PACK_H_
