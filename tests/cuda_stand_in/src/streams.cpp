// Streams and events: what is ordered, and what is not.

#include "state.h"

#include <algorithm>

using namespace stand_in;

namespace stand_in {

Stream* stream_of(cudaStream_t handle) {
  if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
    return &state().legacy[current_device()];
  return reinterpret_cast<Stream*>(handle);
}

static void follow(const WorkPtr& work, const WorkPtr& before) {
  if (!before || before->state == Work::kDone) return;
  before->followers.push_back(work);
  work->before.push_back(before);
  work->unmet++;
}

static void queue(Stream* stream, const WorkPtr& work) {
  stream->last = work;
  if (work->unmet == 0) state().ready.push_back(work);
}

// Programming Guide, "Default Stream": the legacy stream waits for all blocking streams of its
// device, and they wait for it; a stream that was created non-blocking does neither.
static void follow_default_stream(Stream* stream, const WorkPtr& work) {
  State& s = state();
  Stream* legacy = &s.legacy[stream->device];
  if (stream == legacy) {
    for (auto* other : s.streams)
      if (other->blocking && other->device == stream->device && !other->capture) follow(work, other->last);
  } else if (stream->blocking) {
    follow(work, legacy->last);
  }
}

cudaError_t submit(Stream* stream, const std::string& name, std::function<void()> body, NodeFacts facts) {
  if (stream->destroyed) return failed(cudaErrorInvalidResourceHandle, name.c_str());
  if (Capture* capture = stream->capture) {
    if (capture->status == cudaStreamCaptureStatusInvalidated)
      return failed(cudaErrorStreamCaptureInvalidated, name.c_str());
    auto node = std::make_shared<GraphNode>(GraphNode{name, std::move(body), stream->frontier, std::move(facts), {}});
    for (auto& parameter : node->facts.parameters) node->addresses.push_back(parameter.data());
    stream->frontier = {node.get()};
    capture->graph->nodes.push_back(std::move(node));
    return cudaSuccess;
  }
  auto work = std::make_shared<Work>();
  work->name = name;
  work->body = std::move(body);
  follow(work, stream->last);
  follow_default_stream(stream, work);
  queue(stream, work);
  return cudaSuccess;
}

void submit_last(int device, std::function<void()> body) {
  State& s = state();
  auto work = std::make_shared<Work>();
  work->name = "release of memory";
  work->body = std::move(body);
  follow(work, s.legacy[device].last);
  for (auto* stream : s.streams)
    if (stream->device == device) follow(work, stream->last);
  if (work->unmet == 0) s.ready.push_back(work);
}

}  // namespace stand_in

// ---- streams

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  ENTER(cudaStreamCreate);
  auto* stream = new Stream;
  stream->device = current_device();
  stream->blocking = !(flags & cudaStreamNonBlocking);
  state().streams.insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithFlags(handle, 0); }

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  cudaError_t error = cudaStreamCreateWithFlags(handle, flags);
  if (error == cudaSuccess) stream_of(*handle)->priority = priority;
  return error;
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  ENTER(cudaStreamDestroy);
  Stream* stream = stream_of(handle);
  if (!state().streams.count(stream)) return cudaSuccess;
  finish(lock, stream->last);
  state().streams.erase(stream);
  stream->destroyed = true;  // not deleted: a call with its handle is an error
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
}

// "Prohibited and Unhandled Operations": it is invalid to synchronize or query the execution status
// of a stream which is being captured.
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ENTER(cudaStreamSynchronize);
  Stream* stream = stream_of(handle);
  if (stream->destroyed) return failed(cudaErrorInvalidResourceHandle, "cudaStreamSynchronize");
  if (stream->capture) {
    invalidate(stream->capture);
    return failed(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  }
  if (prohibited("cudaStreamSynchronize")) return failed(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  finish(lock, stream->last);
  if (stream == &state().legacy[stream->device])
    for (auto* other : std::set<Stream*>(state().streams))
      if (other->blocking && other->device == stream->device) finish(lock, other->last);
  return state().broken == cudaSuccess ? cudaSuccess : failed(state().broken, "cudaStreamSynchronize");
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ENTER(cudaStreamQuery);
  Stream* stream = stream_of(handle);
  if (stream->capture) {
    invalidate(stream->capture);
    return failed(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  }
  return stream->last && stream->last->state != Work::kDone ? cudaErrorNotReady : cudaSuccess;
}

// The next host function of this thread stands for a kernel: its name, and its parameters of these
// sizes one after the other (see values.py).
static thread_local std::string kernel_name;
static thread_local NodeFacts kernel_facts;

EXPORT void stand_in_next_is_kernel(const char* name, const char* data, const int* sizes, int count) {
  kernel_name = name;
  kernel_facts = {};
  for (int i = 0; i < count; data += sizes[i++]) kernel_facts.parameters.emplace_back(data, data + sizes[i]);
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER(cudaLaunchHostFunc);
  NodeFacts facts;
  facts.type = CU_GRAPH_NODE_TYPE_HOST;
  std::string name = "host function";
  if (!kernel_name.empty()) std::swap(name, kernel_name), std::swap(facts, kernel_facts);
  kernel_name.clear();
  return submit(stream_of(stream), name, [=] { function(data); }, std::move(facts));
}

// "Prohibited and Unhandled Operations": cudaStreamAddCallback is deprecated and invalid in a capture.
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  ENTER(cudaStreamAddCallback);
  Stream* stream = stream_of(handle);
  if (stream->capture) {
    invalidate(stream->capture);
    return failed(cudaErrorStreamCaptureUnsupported, "cudaStreamAddCallback");
  }
  return submit(stream, "callback", [=] { function(handle, cudaSuccess, data); });
}

// "Cross-stream Dependencies and Events": waiting for an event of a capture brings a stream into it;
// a captured stream may not wait for uncaptured work, nor for another capture.
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited, unsigned) {
  ENTER(cudaStreamWaitEvent);
  Stream* stream = stream_of(handle);
  auto* event = reinterpret_cast<Event*>(waited);
  if (Capture* capture = capture_of(*event)) {
    if (stream->capture && stream->capture != capture) {
      invalidate(stream->capture);
      invalidate(capture);
      return failed(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
    }
    if (stream == &state().legacy[stream->device]) {
      invalidate(capture);
      return failed(cudaErrorStreamCaptureImplicit, "cudaStreamWaitEvent");
    }
    if (!stream->capture) {
      stream->capture = capture;
      capture->streams.insert(stream);
      stream->frontier.clear();
    }
    for (auto* node : event->frontier)
      if (std::find(stream->frontier.begin(), stream->frontier.end(), node) == stream->frontier.end())
        stream->frontier.push_back(node);
    return cudaSuccess;
  }
  if (!event->recorded) return cudaSuccess;
  if (stream->capture) {
    invalidate(stream->capture);
    return failed(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  if (event->work && event->work->state != Work::kDone) {
    auto wait = std::make_shared<Work>();
    wait->name = "wait for an event";
    follow(wait, stream->last);
    follow(wait, event->work);
    queue(stream, wait);
  }
  return cudaSuccess;
}

// ---- events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock(state().mutex);
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t recorded, cudaStream_t handle, unsigned) {
  ENTER(cudaEventRecord);
  Stream* stream = stream_of(handle);
  auto* event = reinterpret_cast<Event*>(recorded);
  if (Capture* capture = stream->capture) {
    if (capture->status == cudaStreamCaptureStatusInvalidated)
      return failed(cudaErrorStreamCaptureInvalidated, "cudaEventRecord");
    *event = {true, nullptr, capture->id, stream->frontier};
    return cudaSuccess;
  }
  submit(stream, "event", nullptr);
  *event = {true, stream->last, 0, {}};
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

// An event that was last recorded in a capture stands for no work: it may not be queried or waited for.
static cudaError_t refused(const Event& event, const char* call) {
  if (event.capture_id) {
    if (Capture* capture = capture_of(event)) invalidate(capture);
    return failed(cudaErrorCapturedEvent, call);
  }
  if (prohibited(call)) return failed(cudaErrorStreamCaptureUnsupported, call);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t queried) {
  ENTER(cudaEventQuery);
  auto* event = reinterpret_cast<Event*>(queried);
  if (cudaError_t status = refused(*event, "cudaEventQuery"); status != cudaSuccess) return status;
  return event->work && event->work->state != Work::kDone ? cudaErrorNotReady : cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t waited) {
  ENTER(cudaEventSynchronize);
  auto* event = reinterpret_cast<Event*>(waited);
  if (cudaError_t status = refused(*event, "cudaEventSynchronize"); status != cudaSuccess) return status;
  finish(lock, event->work);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  Lock lock(state().mutex);
  auto *a = reinterpret_cast<Event*>(first), *b = reinterpret_cast<Event*>(second);
  *ms = a->work && b->work ? static_cast<float>((b->work->finished - a->work->finished) * 1e3) : 0.0f;
  return cudaSuccess;
}
