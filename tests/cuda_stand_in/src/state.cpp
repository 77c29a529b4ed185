// The state itself: settings from the environment, errors, counters, faults, running work.

#include "state.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace stand_in {

static long long setting(const char* name, long long otherwise) {
  const char* text = getenv(name);
  return text ? atoll(text) : otherwise;
}

State& state() {
  static State* only = [] {
    auto* made = new State;
    made->num_devices = static_cast<int>(setting("STAND_IN_DEVICES", 1));
    made->memory_limit = static_cast<size_t>(setting("STAND_IN_MEMORY", 8ll << 30));
    made->random.seed(static_cast<unsigned long>(setting("STAND_IN_SEED", 0)));
    made->log = setting("STAND_IN_LOG", 0) != 0;
    for (int device = 0; device < kMaxDevices; device++) made->legacy[device].device = device;
    return made;
  }();
  return *only;
}

int& current_device() {
  static thread_local int device = 0;
  return device;
}

cudaStreamCaptureMode& thread_capture_mode() {
  static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

static cudaError_t& thread_error() {
  static thread_local cudaError_t error = cudaSuccess;
  return error;
}

cudaError_t failed(cudaError_t error, const char* call) {
  thread_error() = error;
  if (state().log) fprintf(stderr, "[stand-in] %s returns %d\n", call, error);
  return error;
}

cudaError_t last_error(bool reset) {
  cudaError_t error = thread_error();
  if (reset) thread_error() = cudaSuccess;
  return error;
}

cudaError_t entered(const char* call) {
  State& s = state();
  s.calls[call]++;
  if (s.log) fprintf(stderr, "[stand-in] %s\n", call);
  auto due = s.faults.find(call);
  if (due == s.faults.end() || due->second.skip-- > 0) return cudaSuccess;
  cudaError_t error = due->second.error;
  s.faults.erase(due);
  return error;
}

// ---- running work

static double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Waits for another thread to finish something, without Python's interpreter lock if we hold it.
static void wait_for_others(Lock& lock) {
  static auto held = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  static auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  if (!(held && save && restore && held())) {
    state().finished.wait(lock);
    return;
  }
  void* thread = save();
  state().finished.wait(lock);
  lock.unlock();  // never wait for the interpreter with our lock held
  restore(thread);
  lock.lock();
}

static std::unordered_set<Work*> with_ancestors(const WorkPtr& work) {
  std::unordered_set<Work*> found;
  std::vector<Work*> todo{work.get()};
  while (!todo.empty()) {
    Work* each = todo.back();
    todo.pop_back();
    if (!found.insert(each).second) continue;
    for (auto& weak : each->before)
      if (auto before = weak.lock(); before && before->state != Work::kDone) todo.push_back(before.get());
  }
  return found;
}

// Runs one piece of ready work. Nothing but a dependency orders work, so the choice is random.
static void run(Lock& lock, size_t position) {
  State& s = state();
  WorkPtr work = s.ready[position];
  std::swap(s.ready[position], s.ready.back());
  s.ready.pop_back();
  work->state = Work::kRunning;
  if (work->body) {
    lock.unlock();
    work->body();
    lock.lock();
  }
  work->body = nullptr;
  work->state = Work::kDone;
  work->finished = now();
  for (auto& follower : work->followers)
    if (--follower->unmet == 0) s.ready.push_back(follower);
  work->followers.clear();
  work->before.clear();
  s.finished.notify_all();
}

// Half of the waits run only what is waited for, the others whatever is ready. Both are what a
// device may do, and code that lacks a wait is wrong under one of them. `work` is not a reference to
// the last of a stream: what runs here may submit more to it.
void finish(Lock& lock, WorkPtr work) {
  State& s = state();
  if (!work || work->state == Work::kDone) return;
  bool only_needed = s.random() & 1;
  std::unordered_set<Work*> needed;
  if (only_needed) needed = with_ancestors(work);
  while (work->state != Work::kDone) {
    std::vector<size_t> choices;
    for (size_t i = 0; i < s.ready.size(); i++)
      if (!only_needed || needed.count(s.ready[i].get())) choices.push_back(i);
    if (choices.empty())
      wait_for_others(lock);
    else
      run(lock, choices[s.random() % choices.size()]);
  }
}

void finish_device(Lock& lock, int device) {
  State& s = state();
  std::vector<WorkPtr> last{s.legacy[device].last};
  for (auto* stream : s.streams)
    if (stream->device == device) last.push_back(stream->last);
  for (auto& work : last) finish(lock, work);
}

}  // namespace stand_in

using namespace stand_in;

// ---- for tests (ctypes)

EXPORT void stand_in_inject(const char* call, int error, int skip) {
  Lock lock(state().mutex);
  state().faults[call] = {static_cast<cudaError_t>(error), skip};
}

EXPORT void stand_in_clear_faults() {
  Lock lock(state().mutex);
  state().faults.clear();
  state().broken = cudaSuccess;
}

EXPORT void stand_in_seed(unsigned long long seed) {
  Lock lock(state().mutex);
  state().random.seed(seed);
}

EXPORT void stand_in_limit_memory(size_t bytes) {
  Lock lock(state().mutex);
  state().memory_limit = bytes;
}

EXPORT void stand_in_compute(bool computing) {
  Lock lock(state().mutex);
  state().computing = computing;
}

EXPORT void stand_in_poison_up_to(size_t bytes) {
  Lock lock(state().mutex);
  state().poison_limit = bytes;
}

// Memory that another process takes, or with a negative number gives back.
EXPORT void stand_in_other_process(int device, long long bytes) {
  Lock lock(state().mutex);
  state().used[device] += bytes;
}

EXPORT long stand_in_calls(const char* call) {
  Lock lock(state().mutex);
  return state().calls[call];
}

EXPORT size_t stand_in_used(int device) {
  Lock lock(state().mutex);
  return state().used[device];
}
