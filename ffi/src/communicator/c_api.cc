#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>

#include "communicator/c_api_internal.h"
#include "communicator/world.h"
#include "executor/pages.h"
#include "jaxcoll/jaxcoll.h"

using jaxcoll::Status;

struct jc_world {
  std::unique_ptr<jaxcoll::World> world;
};

struct jc_fake {
  jaxcoll::FakeNetwork net;
};

struct jc_op {
  std::mutex mu;
  std::condition_variable cv;
  bool over = false;
  Status status;
};

namespace {

thread_local std::string last_error;
std::atomic<void (*)(const char*)> log_sink{nullptr};
std::atomic<jaxcoll::World*> current_world{nullptr};

using jaxcoll::Report;

void LogLine(const std::string& message) {
  if (auto* sink = log_sink.load())
    sink(message.c_str());
  else
    fprintf(stderr, "jaxcoll: %s\n", message.c_str());
}

Status NoSet() { return Status::Error("this process has not used that communicator's schedule set yet"); }

}  // namespace

namespace jaxcoll {
World* CurrentWorld() { return current_world.load(std::memory_order_acquire); }

World* WorldOf(jc_world* w) { return w->world.get(); }

Call MakeCall(int64_t device, int64_t launch, int32_t kind, int32_t reduce, int32_t dtype, int64_t site,
              int64_t set_key, const int64_t* devices, int32_t group_size, int32_t groups, int leaves,
              void* const* inputs, void* const* outputs, const int64_t* counts) {
  Call call;
  call.kind = static_cast<Kind>(kind);
  call.reduce = static_cast<Reduction>(reduce);
  call.dtype = static_cast<DType>(dtype);
  call.site = static_cast<uint64_t>(site);
  call.set_key = set_key;
  call.device = device;
  call.launch = launch;
  call.devices = devices;
  call.group_size = static_cast<size_t>(group_size);
  call.groups = static_cast<size_t>(groups);
  call.inputs.assign(inputs, inputs + leaves);
  call.outputs.assign(outputs, outputs + leaves);
  call.counts.assign(counts, counts + leaves);
  return call;
}

int Report(const Status& s) {
  if (s.ok()) return 0;
  last_error = s.message();
  return -1;
}
}  // namespace jaxcoll

extern "C" {

const char* jc_version(void) { return JAXCOLL_VERSION; }
int jc_api_version(void) { return JC_API_VERSION; }
const char* jc_last_error(void) { return last_error.c_str(); }
void jc_set_log(void (*log)(const char*)) { log_sink = log; }

jc_world* jc_world_create(const jc_options* o, int processes, int me) {
  if (processes < 1 || me < 0 || me >= processes) {
    last_error = jaxcoll::Format("process %d of %d", me, processes);
    return nullptr;
  }
  jaxcoll::EngineOptions options;
  options.timeout_ns = o->timeout_ns;
  options.warn_ns = o->warn_ns;
  options.mismatch_ns = o->mismatch_ns;
  options.spin_ns = o->spin_ns;
  options.helpers = o->helpers;
  options.record = o->record != 0;
  options.threads = o->threads != 0;
  if (o->lane_bytes > 0) options.lane_bytes = static_cast<size_t>(o->lane_bytes);
  if (o->landing_bytes > 0) options.landing_bytes = static_cast<size_t>(o->landing_bytes);
  if (o->early_bytes > 0) options.early_bytes = static_cast<size_t>(o->early_bytes);
  options.log = LogLine;
  options.quiet = o->quiet != 0;
  if (o->keep_memory != 0) jaxcoll::KeepFreedMemory();
  return new jc_world{std::make_unique<jaxcoll::World>(std::move(options), processes, me)};
}

int jc_world_add_devices(jc_world* w, int process, const int64_t* devices, int count) {
  return Report(w->world->AddDevices(process, devices, static_cast<size_t>(count)));
}

size_t jc_shm_segment_bytes(int places) { return jaxcoll::ShmTransport::SegmentBytes(places); }
int jc_world_shm_create(jc_world* w, int fd, int places, int place) {
  return Report(w->world->CreateShm(fd, places, place));
}
int jc_world_shm_peer(jc_world* w, int process, int fd, int place, int pid, int allow_read) {
  return Report(w->world->AddShmPeer(process, fd, place, pid, allow_read != 0));
}
int jc_world_tcp_peer(jc_world* w, int process, const int* fds, int count, int carries_data) {
  return Report(w->world->AddTcpPeer(process, std::vector<int>(fds, fds + count), carries_data != 0));
}
int jc_world_fake_peer(jc_world* w, jc_fake* net, int process) {
  return Report(w->world->AddFakePeer(&net->net, process));
}
int jc_world_start(jc_world* w) { return Report(w->world->Start()); }
void jc_world_stop(jc_world* w) { w->world->Stop(); }
void jc_world_free(jc_world* w) {
  jaxcoll::World* mine = w->world.get();
  current_world.compare_exchange_strong(mine, nullptr);
  delete w;
}
const char* jc_world_link_name(jc_world* w, int process) { return w->world->LinkName(process); }
int64_t jc_world_failures(jc_world* w) {
  return w->world->engine() ? static_cast<int64_t>(w->world->engine()->failures()) : 0;
}

int jc_world_peer(jc_world* w, int process) {
  return w->world->engine() ? static_cast<int>(w->world->engine()->StateOf(process)) : 0;
}

int64_t jc_world_open_operations(jc_world* w) {
  return w->world->engine() ? static_cast<int64_t>(w->world->engine()->open_operations()) : 0;
}
int jc_world_sending(jc_world* w) { return w->world->engine() ? w->world->engine()->Sending() : -1; }
int jc_world_pump(jc_world* w) { return w->world->engine()->Pump() ? 1 : 0; }
void jc_world_tick(jc_world* w) { w->world->engine()->Tick(); }
void jc_world_use(jc_world* w) {
  current_world.store(w == nullptr ? nullptr : w->world.get(), std::memory_order_release);
}

jc_fake* jc_fake_create(uint64_t seed, int can_read) { return new jc_fake{jaxcoll::FakeNetwork(seed, can_read != 0)}; }
int jc_fake_step(jc_fake* net) { return net->net.Step() ? 1 : 0; }
void jc_fake_kill(jc_fake* net, int process) { net->net.Kill(process); }
void jc_fake_free(jc_fake* net) { delete net; }

int64_t jc_program_load(jc_world* w, const uint8_t* bytes, size_t size) {
  int64_t handle = -1;
  return Report(w->world->LoadProgram(bytes, size, &handle)) == 0 ? handle : -1;
}

int jc_program_check(const uint8_t* bytes, size_t size, const uint8_t* table, size_t table_size) {
  jaxcoll::Program program;
  Status s = jaxcoll::Program::Parse(bytes, size, &program);
  if (!s.ok()) return Report(s);
  jaxcoll::Table t = jaxcoll::Table::Identity(program);
  if (table_size > 0) {
    s = jaxcoll::Table::Parse(table, table_size, program, &t);
    if (!s.ok()) return Report(s);
  }
  return Report(jaxcoll::Validate(program, t));
}

int jc_set_define(jc_world* w, int64_t set_key, const int64_t* devices, int ranks, const int64_t* programs, int count,
                  int chosen) {
  return Report(w->world->DefineSet(set_key, devices, static_cast<size_t>(ranks),
                                    std::vector<int64_t>(programs, programs + count), static_cast<size_t>(chosen)));
}

uint64_t jc_group_id(const int64_t* devices, int count) {
  return jaxcoll::GroupId(devices, static_cast<size_t>(count));
}

int jc_set_stage(jc_world* w, uint64_t group, int64_t set_key, uint64_t version, int64_t program, const uint8_t* table,
                 size_t size) {
  return Report(w->world->Stage(group, set_key, version, program, table, size));
}

int jc_set_started(jc_world* w, uint64_t group, int64_t set_key, uint64_t* sites, int64_t* launches, uint32_t* indices,
                   int max) {
  auto set = w->world->FindSet(group, set_key);
  if (set == nullptr) return 0;
  int n = 0;
  for (const auto& [site, places] : set->Started()) {
    for (const jaxcoll::Place& place : places) {
      if (n < max) {
        sites[n] = site;
        launches[n] = place.launch;
        indices[n] = place.index;
      }
      ++n;
    }
  }
  return n;
}

int jc_set_propose(jc_world* w, uint64_t group, int64_t set_key, uint64_t version, const uint64_t* sites,
                   const int64_t* launches, const uint32_t* indices, int count) {
  auto set = w->world->FindSet(group, set_key);
  if (set == nullptr) return Report(NoSet());
  jaxcoll::Places points;
  for (int i = 0; i < count; ++i) points[sites[i]].push_back({launches[i], indices[i]});
  return Report(set->Propose(version, std::move(points)));
}

int jc_set_decide(jc_world* w, uint64_t group, int64_t set_key, uint64_t version, int commit) {
  auto set = w->world->FindSet(group, set_key);
  return Report(set == nullptr ? NoSet() : set->Decide(version, commit != 0));
}

int64_t jc_set_version(jc_world* w, uint64_t group, int64_t set_key) {
  auto set = w->world->FindSet(group, set_key);
  return set == nullptr ? -1 : static_cast<int64_t>(set->version());
}

int64_t jc_set_held(jc_world* w, uint64_t group, int64_t set_key) {
  auto set = w->world->FindSet(group, set_key);
  return set == nullptr ? 0 : set->held_ns();
}

int64_t jc_set_waiting(jc_world* w, uint64_t group, int64_t set_key) {
  auto set = w->world->FindSet(group, set_key);
  return set == nullptr ? 0 : static_cast<int64_t>(set->waiting());
}

jc_op* jc_op_start(jc_world* w, int64_t device, int64_t launch, int32_t kind, int32_t reduce, int32_t dtype,
                   int64_t site, int64_t set_key, const int64_t* devices, int32_t group_size, int32_t groups,
                   int leaves, void* const* inputs, void* const* outputs, const int64_t* counts) {
  jaxcoll::Call call = jaxcoll::MakeCall(device, launch, kind, reduce, dtype, site, set_key, devices, group_size,
                                         groups, leaves, inputs, outputs, counts);
  auto* op = new jc_op;
  Status status;
  auto done = [op](const Status& s) {
    std::lock_guard<std::mutex> lock(op->mu);
    op->status = s;
    op->over = true;
    op->cv.notify_all();
  };
  if (w->world->Execute(std::move(call), &status, done)) done(status);
  return op;
}

int jc_op_wait(jc_op* op, int64_t timeout_ns) {
  std::unique_lock<std::mutex> lock(op->mu);
  if (!op->cv.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return op->over; })) return 1;
  return Report(op->status);
}

void jc_op_free(jc_op* op) { delete op; }

int64_t jc_records_drain(jc_world* w, void* out, int64_t max, uint64_t* dropped) {
  if (w->world->engine() == nullptr) return 0;
  return static_cast<int64_t>(
      w->world->engine()->records().DrainTo(static_cast<jaxcoll::Record*>(out), static_cast<size_t>(max), dropped));
}

void jc_records_enable(jc_world* w, int on) { w->world->engine()->set_record(on != 0); }

void jc_records_sample(jc_world* w, uint32_t stride) { w->world->engine()->set_record_stride(stride); }

void jc_records_notify(jc_world* w, void (*wake)(void*), void* arg, int64_t threshold) {
  std::function<void()> f;
  if (wake != nullptr) f = [wake, arg] { wake(arg); };
  w->world->engine()->SetRecordSink(std::move(f), static_cast<size_t>(threshold));
}

int jc_combine(int32_t dtype, int32_t reduce, void* dst, int dst_wide, const void* const* sources, const int* wide,
               int count, size_t n) {
  auto type = static_cast<jaxcoll::DType>(dtype);
  auto op = static_cast<jaxcoll::Reduction>(reduce);
  if (!jaxcoll::CanReduce(type, op)) return Report(Status::Error("no such reduction"));
  std::vector<jaxcoll::Source> list;
  list.reserve(static_cast<size_t>(std::max(0, count)));
  for (int i = 0; i < count; ++i) list.push_back({sources[i], wide[i] != 0});
  jaxcoll::Combine(type, op, dst, dst_wide != 0, list.data(), count, n);
  return 0;
}

}  // extern "C"
