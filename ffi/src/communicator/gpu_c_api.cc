// The C interface of the GPU side.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "communicator/c_api_internal.h"
#include "communicator/request.h"
#include "communicator/world.h"
#include "gpu/runtime.h"
#include "gpu/team.h"
#include "jaxcoll/jaxcoll.h"

using jaxcoll::Format;
using jaxcoll::Report;
using jaxcoll::Status;
namespace gpu = jaxcoll::gpu;

struct jc_gpu {
  explicit jc_gpu(const std::shared_ptr<const gpu::Api>& api)
      : runtime(std::make_shared<gpu::Runtime>(api)), versions(api->Describe()) {}
  const std::shared_ptr<gpu::Runtime> runtime;
  const std::string versions;
};

struct jc_gpu_team {
  jc_gpu* gpu;
  std::shared_ptr<jaxcoll::Group> group;
  std::vector<int> local;
  std::unique_ptr<gpu::Team> team;
  struct Loaded {
    std::shared_ptr<const jaxcoll::Program> program;
    std::shared_ptr<const jaxcoll::Table> table;
    std::vector<std::shared_ptr<const jaxcoll::Plan>> plans;  // [local * 2 + wide]
  };
  std::mutex mu;
  std::vector<std::unique_ptr<Loaded>> programs;
};

namespace {

Status ReadOptions(const jc_gpu_options* o, int ranks, int count, gpu::Options* out) {
  if (ranks < 1 || count < 1 || count > ranks || o->max_streams < 1 || o->timeout_ns < 1)
    return Status::Error(Format("%d local ranks of %d, at most %d streams, %lld ns time-out", count, ranks,
                                o->max_streams, static_cast<long long>(o->timeout_ns)));
  out->pairs = o->pairs != 0;
  out->record = o->record != 0;
  out->max_streams = o->max_streams;
  out->max_ctas = o->max_ctas;
  out->timeout_ns = o->timeout_ns;
  if (o->hosts != nullptr) out->hosts.assign(o->hosts, o->hosts + ranks);
  return {};
}

constexpr timespec kWaitPause = {0, 200000};

}  // namespace

extern "C" {

jc_gpu* jc_gpu_open(const char* library, const char* const* folders, int count) {
  gpu::ApiOptions options;
  options.library = library;
  options.folders.assign(folders, folders + count);
  std::shared_ptr<const gpu::Api> api;
  if (Report(gpu::Api::Open(options, &api)) != 0) return nullptr;
  return new jc_gpu(api);
}

void jc_gpu_close(jc_gpu* g) { delete g; }
const char* jc_gpu_versions(jc_gpu* g) { return g->versions.c_str(); }

int jc_gpu_unique_id(jc_gpu* g, uint8_t* out) {
  gpu::UniqueId id;
  Status s = g->runtime->api->Nccl(g->runtime->api->ncclGetUniqueId(&id), "ncclGetUniqueId");
  if (s.ok()) memcpy(out, id.bytes, sizeof(id.bytes));
  return Report(s);
}

jc_gpu_team* jc_gpu_join(jc_gpu* g, const jc_gpu_options* o, uint64_t id, const char* name, int ranks, const int* local,
                         const int* devices, int count, const uint8_t* unique_id) {
  gpu::Options options;
  if (Report(ReadOptions(o, ranks, count, &options)) != 0) return nullptr;
  auto t = std::make_unique<jc_gpu_team>();
  t->gpu = g;
  t->group = std::make_shared<jaxcoll::Group>();
  t->group->id = id;
  t->group->name = name;
  t->group->process.assign(static_cast<size_t>(ranks), 0);
  t->local.assign(local, local + count);
  t->team = std::make_unique<gpu::Team>(g->runtime->api, &g->runtime->kernels, &g->runtime->monitor, options, id, name,
                                        ranks);
  gpu::UniqueId unique;
  memcpy(unique.bytes, unique_id, sizeof(unique.bytes));
  if (Report(t->team->Join(t->local, std::vector<int>(devices, devices + count), unique)) != 0) return nullptr;
  return t.release();
}

void jc_gpu_leave(jc_gpu_team* t) { delete t; }

int64_t jc_gpu_program(jc_gpu_team* t, const uint8_t* bytes, size_t size, const uint8_t* table, size_t table_size,
                       int* made) {
  auto program = std::make_shared<jaxcoll::Program>();
  auto loaded = std::make_unique<jc_gpu_team::Loaded>();
  *made = 0;
  if (Report(jaxcoll::Program::Parse(bytes, size, program.get())) != 0) return -1;
  if (program->nranks != t->group->size())
    return Report(Status::Error(Format("program %s is for %d ranks, the communicator has %d", program->name.c_str(),
                                       program->nranks, t->group->size())));
  jaxcoll::Table parsed = jaxcoll::Table::Identity(*program);
  if (table_size > 0 && Report(jaxcoll::Table::Parse(table, table_size, *program, &parsed)) != 0) return -1;
  if (Report(jaxcoll::Validate(*program, parsed)) != 0) return -1;
  loaded->table = std::make_shared<jaxcoll::Table>(std::move(parsed));
  loaded->program = program;
  for (int rank : t->local)
    for (bool wide : {false, true}) loaded->plans.push_back(jaxcoll::CompilePlan(program, loaded->table, rank, wide));
  if (Report(t->team->Connect(*program, *loaded->table, made)) != 0) return -1;
  std::lock_guard<std::mutex> lock(t->mu);
  t->programs.push_back(std::move(loaded));
  return static_cast<int64_t>(t->programs.size() - 1);
}

int jc_gpu_enqueue(jc_gpu_team* t, int64_t handle, int rank, int64_t launch, int64_t site, uint32_t index,
                   int32_t reduce, int32_t dtype, int leaves, void* const* inputs, void* const* outputs,
                   const int64_t* counts, void* stream) {
  jc_gpu_team::Loaded* loaded = nullptr;
  {
    std::lock_guard<std::mutex> lock(t->mu);
    if (handle >= 0 && static_cast<size_t>(handle) < t->programs.size())
      loaded = t->programs[static_cast<size_t>(handle)].get();
  }
  size_t place = 0;
  while (place < t->local.size() && t->local[place] != rank) ++place;
  if (loaded == nullptr || place == t->local.size())
    return Report(Status::Error("no such program, or the rank is not in this process"));
  jaxcoll::OpRequest request;
  request.key = {t->group->id, static_cast<uint64_t>(site), launch, index};
  request.group = t->group;
  request.rank = rank;
  jaxcoll::Kind kind = loaded->program->kind;
  auto type = static_cast<jaxcoll::DType>(dtype);
  auto op = static_cast<jaxcoll::Reduction>(reduce);
  if (Report(jaxcoll::SetOperands(kind, op, type, static_cast<size_t>(leaves), inputs, outputs, counts, &request)) != 0)
    return -1;
  request.plan = loaded->plans[place * 2 + (jaxcoll::KeepsWide(kind, type, op) ? 1 : 0)];
  return Report(t->team->Enqueue(request, t->team->PlanFor(request), stream, {}));
}

int jc_gpu_wait(jc_gpu_team* t, int64_t timeout_ns) {
  int64_t deadline = jaxcoll::NowNs() + timeout_ns;
  for (;;) {
    if (t->team->failed()) return Report(Status::Error(t->team->failure()));
    if (t->team->under_way == 0) return 0;
    if (jaxcoll::NowNs() > deadline) return 1;
    nanosleep(&kWaitPause, nullptr);
  }
}

void jc_gpu_fail(jc_gpu_team* t, const char* why) { t->team->Fail(why); }

int jc_world_gpu_join(jc_world* w, jc_gpu* g, const jc_gpu_options* o, const int64_t* devices, int ranks,
                      const int* ordinals, int count, const uint8_t* unique_id) {
  gpu::Options options;
  if (Report(ReadOptions(o, ranks, count, &options)) != 0) return -1;
  gpu::UniqueId unique;
  memcpy(unique.bytes, unique_id, sizeof(unique.bytes));
  return Report(jaxcoll::WorldOf(w)->JoinGpu(g->runtime, options, devices, static_cast<size_t>(ranks),
                                             std::vector<int>(ordinals, ordinals + count), unique));
}

int jc_world_gpu_connect(jc_world* w, uint64_t group, int64_t set_key) {
  int made = 0;
  return Report(jaxcoll::WorldOf(w)->ConnectGpu(group, set_key, &made)) == 0 ? made : -1;
}

int jc_world_gpu_failed(jc_world* w, uint64_t group, char* out, int64_t size) {
  std::string why;
  if (!jaxcoll::WorldOf(w)->GpuFailed(group, &why)) return 0;
  if (size > 0) snprintf(out, static_cast<size_t>(size), "%s", why.c_str());
  return 1;
}

int jc_world_gpu_enqueue(jc_world* w, int64_t device, int64_t launch, int32_t kind, int32_t reduce, int32_t dtype,
                         int64_t site, int64_t set_key, const int64_t* devices, int32_t group_size, int32_t groups,
                         int leaves, void* const* inputs, void* const* outputs, const int64_t* counts, void* stream) {
  jaxcoll::Call call = jaxcoll::MakeCall(device, launch, kind, reduce, dtype, site, set_key, devices, group_size,
                                         groups, leaves, inputs, outputs, counts);
  return Report(jaxcoll::WorldOf(w)->ExecuteGpu(std::move(call), stream, {}));
}

int64_t jc_gpu_records_drain(jc_gpu* g, void* out, int64_t max, uint64_t* dropped) {
  return static_cast<int64_t>(
      g->runtime->records.DrainTo(static_cast<jaxcoll::Record*>(out), static_cast<size_t>(max), dropped));
}

void jc_gpu_records_sample(jc_gpu* g, uint32_t stride) { g->runtime->monitor.set_record_stride(stride); }

void jc_gpu_records_notify(jc_gpu* g, void (*wake)(void*), void* arg, int64_t threshold) {
  std::function<void()> f;
  if (wake != nullptr) f = [wake, arg] { wake(arg); };
  g->runtime->sink.Set(std::move(f), static_cast<size_t>(threshold));
}

const char* jc_gpu_combine_source(void) { return gpu::CombineSource(); }

}  // extern "C"
