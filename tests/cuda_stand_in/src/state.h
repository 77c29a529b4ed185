// State shared by all parts of the stand-in for the CUDA runtime.
//
// Device memory is host memory, streams are queues of work, and work runs when somebody waits for
// it. One lock guards the state. The body of a piece of work runs outside the lock, because it may
// need Python's interpreter lock, which another thread may hold while it waits for ours.

#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#undef cudaGetDeviceProperties

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stand_in {

constexpr int kMaxDevices = 8;

// ---- work

struct Work;
using WorkPtr = std::shared_ptr<Work>;

// Submitted work. It may run at any time after everything in `unmet` is done.
struct Work {
  enum State { kWaiting, kRunning, kDone };
  std::string name;
  std::function<void()> body;
  State state = kWaiting;
  int unmet = 0;
  std::vector<WorkPtr> followers;
  std::vector<std::weak_ptr<Work>> before;
  double finished = 0;
};

// What the driver tells of a node. Of a kernel: `function`, which has a name, or the bytes of each
// parameter. Of a copy or a fill: `to`, `from` and `bytes`.
struct NodeFacts {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_KERNEL;
  const void* function = nullptr;
  dim3 grid{1, 1, 1}, block{1, 1, 1};
  std::vector<std::vector<char>> parameters;
  const void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
};

// One node of a graph. `after` are the nodes it depends on.
struct GraphNode {
  std::string name;
  std::function<void()> body;
  std::vector<GraphNode*> after;
  NodeFacts facts;
  std::vector<void*> addresses;  // of the parameters
};

struct Graph {
  std::vector<std::shared_ptr<GraphNode>> nodes;
  int device = 0;
  size_t bytes = 0;  // of the device, which an executable graph takes
};

constexpr size_t kExecutableNode = size_t(64) << 10;

// ---- streams, events, captures

struct Stream;

struct Capture {
  unsigned long long id;
  cudaStreamCaptureStatus status;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  std::unique_ptr<Graph> graph;
  std::set<Stream*> streams;
};

struct Stream {
  int device = 0;
  bool blocking = true;  // synchronizes with the legacy default stream
  int priority = 0;
  bool destroyed = false;
  WorkPtr last;
  Capture* capture = nullptr;
  std::vector<GraphNode*> frontier;  // what the next captured node depends on
};

struct Event {
  bool recorded = false;
  WorkPtr work;
  unsigned long long capture_id = 0;  // of the capture it was last recorded in, else 0
  std::vector<GraphNode*> frontier;
};

// ---- memory

// What memory holds after it was allocated and after it was freed.
constexpr unsigned char kFresh = 0xCB;
constexpr unsigned char kFreed = 0xFD;

struct Block {
  enum Kind { kUnknown, kDevice, kPinned };
  size_t size = 0;
  Kind kind = kUnknown;
  int device = 0;
  bool freed = false;  // but not unmapped, for submitted work may use it
};

// ---- everything

struct Fault {
  cudaError_t error;
  int skip;  // how many calls succeed before the one that fails
};

struct State {
  std::mutex mutex;
  std::condition_variable finished;
  std::mt19937_64 random;
  bool log = false;
  bool computing = true;  // otherwise multiplications do nothing, as kernels

  int num_devices = 1;
  size_t memory_limit = 0;
  size_t poison_limit = size_t(64) << 20;  // larger blocks stay untouched, and cost no memory
  size_t used[kMaxDevices] = {};
  std::map<char*, Block> blocks;

  Stream legacy[kMaxDevices];
  std::set<Stream*> streams;
  std::vector<WorkPtr> ready;
  std::map<unsigned long long, Capture*> captures;
  unsigned long long next_capture = 1;

  std::unordered_map<const void*, std::string> kernels;
  std::map<std::string, long> calls;
  std::map<std::string, Fault> faults;
  cudaError_t broken = cudaSuccess;  // a kernel failed: every later wait returns this
};

State& state();
using Lock = std::unique_lock<std::mutex>;

// The device that is current in this thread.
int& current_device();
// The mode of this thread (cudaThreadExchangeStreamCaptureMode).
cudaStreamCaptureMode& thread_capture_mode();

// Records `error` as the last error of this thread and returns it.
cudaError_t failed(cudaError_t error, const char* call);
cudaError_t last_error(bool reset);

// Counts and logs a call. Returns the fault that a test injected for it, or cudaSuccess.
cudaError_t entered(const char* call);

// ---- parts that other parts use

Stream* stream_of(cudaStream_t handle);
// Submits work to a stream, or adds a node to the graph that the stream is capturing into.
cudaError_t submit(Stream* stream, const std::string& name, std::function<void()> body, NodeFacts facts = {});
// Submits work that follows everything submitted to any stream of a device.
void submit_last(int device, std::function<void()> body);
// Runs work until `work` is done. Releases the lock while a body runs.
void finish(Lock& lock, WorkPtr work);
void finish_device(Lock& lock, int device);

std::map<char*, Block>::iterator block_of(const void* pointer);
Block::Kind kind_of(const void* pointer);

void invalidate(Capture* capture);
// Whether a potentially unsafe call is prohibited in this thread now; invalidates the capture.
bool prohibited(const char* call);
// Whether a call that synchronizes everything meets a capture; invalidates all captures it meets.
bool meets_capture(int device);
Capture* capture_of(const Event& event);
bool uploaded(Graph* executable);

}  // namespace stand_in

// Begins an entry point: takes the lock, and fails the call where a fault is due.
#define ENTER(call)                                                       \
  stand_in::Lock lock(stand_in::state().mutex);                           \
  if (cudaError_t fault = stand_in::entered(#call); fault != cudaSuccess) \
  return stand_in::failed(fault, #call)
