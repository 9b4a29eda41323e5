// Steps of a program that NCCL does better as one collective: inside a host, where every rank reduces its share of the
// others' data (a ReduceScatter), or hands its share to all of them (an AllGather). The edges across hosts stay edges.
//
// What is a call depends on program, table and hosts alone, so that all ranks agree. Only whole hosts count: one
// communicator of a host's ranks serves every call there.
#ifndef JAXCOLL_GPU_HOST_CALLS_H_
#define JAXCOLL_GPU_HOST_CALLS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "program/program.h"
#include "reduce/dtype.h"

namespace jaxcoll {
namespace gpu {

struct HostCall {
  int step = 0;
  bool reduce = false;          // ncclReduceScatter, else ncclAllGather
  std::vector<int> ranks;       // of the host, sorted: a rank's place is its rank in the host's communicator
  std::vector<uint32_t> edges;  // of the program: what the call replaces
  // [row][place] chunks, sorted: each row is one call of NCCL, in which the place owns these chunks.
  std::vector<std::vector<std::vector<uint32_t>>> rows;
};

// hosts: [rank] a number for its host. Fewer than two hosts: no calls, the program is the tuner's alone.
std::vector<HostCall> FindHostCalls(const Program& program, const Table& table, const std::vector<int>& hosts);

std::string CallName(const HostCall& call);  // "ncclReduceScatter among ranks 2, 3 of a host"

// Whether NCCL's ReduceScatter gives what our reduction gives, but for the order of a sum. Not for narrow floats, which
// it rounds at every hop, nor for the maximum of floats, where it drops a NaN.
struct NcclReduction {
  int type = 0, op = 0, per_element = 1;  // ncclDataType_t, ncclRedOp_t; a complex number is two
};
bool FindNcclReduction(DType type, Reduction reduction, NcclReduction* out);

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_HOST_CALLS_H_
