// Stream capture and graphs. The rules are those of the CUDA Programming Guide, "Stream Capture",
// and of the reference of cudaStreamBeginCapture.

#include "state.h"

#include <algorithm>

using namespace stand_in;

namespace stand_in {

// "Invalidation": once invalidated, a capture only ends, with an error.
void invalidate(Capture* capture) { capture->status = cudaStreamCaptureStatusInvalidated; }

Capture* capture_of(const Event& event) {
  auto found = state().captures.find(event.capture_id);
  return found == state().captures.end() ? nullptr : found->second;
}

// cudaStreamBeginCapture, `mode`: potentially unsafe calls are prohibited in every thread while a
// capture in global mode is on, and in the capturing thread during a thread-local one. A relaxed
// capture prohibits nothing, and cudaThreadExchangeStreamCaptureMode relaxes a thread.
bool prohibited(const char* call) {
  cudaStreamCaptureMode mode = thread_capture_mode();
  if (mode == cudaStreamCaptureModeRelaxed) return false;
  bool any = false;
  for (auto& [id, capture] : state().captures) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    bool own = capture->thread == std::this_thread::get_id();
    bool both_global = mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (own || both_global) {
      invalidate(capture);
      any = true;
    }
  }
  if (any && state().log) fprintf(stderr, "[stand-in] %s is prohibited during a capture\n", call);
  return any;
}

bool meets_capture(int device) {
  bool any = false;
  for (auto& [id, capture] : state().captures)
    if (capture->origin->device == device) {
      invalidate(capture);
      any = true;
    }
  return any;
}

// Nodes that the end of the origin stream depends on.
static std::set<GraphNode*> joined(const Stream* origin) {
  std::set<GraphNode*> found;
  std::vector<GraphNode*> todo(origin->frontier);
  while (!todo.empty()) {
    GraphNode* node = todo.back();
    todo.pop_back();
    if (found.insert(node).second) todo.insert(todo.end(), node->after.begin(), node->after.end());
  }
  return found;
}

// A graph that is launched: parallel branches run in a random order.
static void run_nodes(const std::vector<std::shared_ptr<GraphNode>>& nodes, unsigned long seed) {
  std::mt19937_64 random(seed);
  std::map<GraphNode*, int> unmet;
  std::map<GraphNode*, std::vector<GraphNode*>> followers;
  std::vector<GraphNode*> ready;
  for (auto& node : nodes) {
    unmet[node.get()] = static_cast<int>(node->after.size());
    for (auto* before : node->after) followers[before].push_back(node.get());
    if (node->after.empty()) ready.push_back(node.get());
  }
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    GraphNode* node = ready.back();
    ready.pop_back();
    if (node->body) node->body();
    for (auto* next : followers[node])
      if (--unmet[next] == 0) ready.push_back(next);
  }
}

}  // namespace stand_in

// ---- capture

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_capture_mode());
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  ENTER(cudaStreamBeginCapture);
  State& s = state();
  Stream* stream = stream_of(handle);
  if (stream == &s.legacy[stream->device]) return failed(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  if (stream->capture) return failed(cudaErrorIllegalState, "cudaStreamBeginCapture");
  auto* capture = new Capture{s.next_capture++, cudaStreamCaptureStatusActive, mode, std::this_thread::get_id(),
                              stream,           std::make_unique<Graph>(),     {stream}};
  s.captures[capture->id] = capture;
  stream->capture = capture;
  stream->frontier.clear();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  ENTER(cudaStreamIsCapturing);
  Stream* stream = stream_of(handle);
  if (stream == &state().legacy[stream->device])
    for (auto& [id, capture] : state().captures)
      if (capture->origin->blocking && capture->origin->device == stream->device)
        return failed(cudaErrorStreamCaptureImplicit, "cudaStreamIsCapturing");
  *status = stream->capture ? stream->capture->status : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** after,
                                            const cudaGraphEdgeData** edges, size_t* count) {
  ENTER(cudaStreamGetCaptureInfo);
  Stream* stream = stream_of(handle);
  *status = stream->capture ? stream->capture->status : cudaStreamCaptureStatusNone;
  if (!stream->capture) return cudaSuccess;
  if (id) *id = stream->capture->id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream->capture->graph.get());
  if (after) *after = reinterpret_cast<const cudaGraphNode_t*>(stream->frontier.data());
  if (edges) *edges = nullptr;
  if (count) *count = stream->frontier.size();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t* nodes,
                                                       const cudaGraphEdgeData*, size_t count, unsigned flags) {
  ENTER(cudaStreamUpdateCaptureDependencies);
  Stream* stream = stream_of(handle);
  if (!stream->capture) return failed(cudaErrorIllegalState, "cudaStreamUpdateCaptureDependencies");
  if (flags == cudaStreamSetCaptureDependencies) stream->frontier.clear();
  for (size_t i = 0; i < count; i++) stream->frontier.push_back(reinterpret_cast<GraphNode*>(nodes[i]));
  return cudaSuccess;
}

// cudaStreamEndCapture: in the stream where it began; unless relaxed, in the thread where it began;
// other streams must have been joined into the origin.
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* made) {
  ENTER(cudaStreamEndCapture);
  State& s = state();
  Stream* stream = stream_of(handle);
  Capture* capture = stream->capture;
  *made = nullptr;
  if (!capture) return failed(cudaErrorIllegalState, "cudaStreamEndCapture");
  if (capture->origin != stream) {
    invalidate(capture);
    return failed(cudaErrorStreamCaptureUnmatched, "cudaStreamEndCapture");
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return failed(cudaErrorStreamCaptureWrongThread, "cudaStreamEndCapture");
  std::set<GraphNode*> reached = joined(stream);
  bool unjoined = false;
  for (auto* each : capture->streams) {
    for (auto* node : each->frontier) unjoined |= !reached.count(node);
    each->capture = nullptr;
    each->frontier.clear();
  }
  bool invalid = capture->status == cudaStreamCaptureStatusInvalidated;
  std::unique_ptr<Graph> graph = std::move(capture->graph);
  s.captures.erase(capture->id);
  delete capture;
  if (invalid) return failed(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  if (unjoined) return failed(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  *made = reinterpret_cast<cudaGraph_t>(graph.release());
  return cudaSuccess;
}

// ---- graphs

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
  ENTER(cudaGraphGetNodes);
  auto* graph = reinterpret_cast<Graph*>(handle);
  if (nodes)  // the last node first: the order is not stated
    for (size_t i = 0; i < std::min(*count, graph->nodes.size()); i++)
      nodes[i] = reinterpret_cast<cudaGraphNode_t>(graph->nodes[graph->nodes.size() - 1 - i].get());
  *count = graph->nodes.size();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t handle, cudaGraphNode_t* nodes, cudaGraphEdgeData*,
                                                size_t* count) {
  ENTER(cudaGraphNodeGetDependencies);
  auto* node = reinterpret_cast<GraphNode*>(handle);
  if (nodes)
    for (size_t i = 0; i < std::min(*count, node->after.size()); i++)
      nodes[i] = reinterpret_cast<cudaGraphNode_t>(node->after[i]);
  *count = node->after.size();
  return cudaSuccess;
}

// The device takes memory for an executable graph when it is uploaded, at the latest by its first launch.
bool stand_in::uploaded(Graph* executable) {
  State& s = state();
  if (executable->bytes) return true;
  size_t bytes = executable->nodes.size() * kExecutableNode;
  if (s.used[executable->device] + bytes > s.memory_limit) return false;
  s.used[executable->device] += executable->bytes = bytes;
  return true;
}

// An executable graph holds its nodes: it outlives the graph that it was made from.
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  ENTER(cudaGraphInstantiate);
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph{reinterpret_cast<Graph*>(graph)->nodes, current_device()});
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  ENTER(cudaGraphDestroy);
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  ENTER(cudaGraphExecDestroy);
  state().used[reinterpret_cast<Graph*>(exec)->device] -= reinterpret_cast<Graph*>(exec)->bytes;
  delete reinterpret_cast<Graph*>(exec);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  ENTER(cudaGraphLaunch);
  if (!uploaded(reinterpret_cast<Graph*>(exec))) return failed(cudaErrorMemoryAllocation, "cudaGraphLaunch");
  auto nodes = reinterpret_cast<Graph*>(exec)->nodes;
  unsigned long seed = state().random();
  return submit(stream_of(stream), "graph", [nodes, seed] { run_nodes(nodes, seed); });
}

EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
