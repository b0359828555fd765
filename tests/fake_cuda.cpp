// fake_cuda.cpp: the driver calls of driver.hpp on a machine without a GPU, as a library that a
// test loads in place of libcuda. "Device memory" is memory of this process, so that tests can make
// tensors of it; streams run on a thread of their own, in order; the pack kernel runs its CPU form.
//
// While a stream is captured, calls that CUDA calls unsafe are refused and end the capture, unless
// their thread has said that it is relaxed: as in the mode that PyTorch captures in.
//
// The tests steer it: hold the streams, fail any call, capture a graph and replay it, and ask what
// is still held. Memory and events can be opened by other processes, while their maker lives.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "driver.hpp"
#include "pack.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400,
              CAPTURE_UNSUPPORTED = 900;

// A page-aligned piece of memory with a descriptor that another process can open.
struct Memory {
  void *at;
  size_t bytes;
  int fd;
};

struct Event {
  Memory memory; // {times recorded, times reached}
  bool is_opened;
  [[nodiscard]] std::atomic<uint64_t> *counts() const {
    return static_cast<std::atomic<uint64_t> *>(memory.at);
  }
};

struct Operation {
  std::function<bool()> is_ready;
  std::function<void()> act;
};

struct Stream {
  std::deque<Operation> queue;
  bool is_busy = false, is_capturing = false, is_invalid = false;
  std::vector<Operation> captured;
  [[nodiscard]] bool is_idle() const { return queue.empty() && !is_busy; }
};

thread_local int capture_mode = 0; // CU_STREAM_CAPTURE_MODE_GLOBAL

// Leaked, as the thread that runs the streams never ends.
struct Fake {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<Stream *> streams, made_streams;
  std::map<uint64_t, Memory> memory, opened;
  std::map<void *, size_t> host, pinned;
  std::set<Event *> events;
  std::map<std::string, int> calls;
  std::vector<std::string> log;
  std::string failing;
  int fail_at = 0, fail_code = 0, sticky = 0, contexts = 0, modules = 0, current = 0;
  int count = 1;
  uint32_t seed = 0;
  int budget = -1; // operations that may run; below 0: any number
  char uuid[16] = "fake device 000";
  std::thread thread;
  bool is_idle = false;

  // Counts a call; what it must return, success apart.
  int enter(const char *name) {
    log.emplace_back(name);
    if (failing == name && --fail_at == 0)
      return fail_code;
    return sticky;
  }

  // Whether an unsafe call may be made now.
  [[nodiscard]] bool may_be_unsafe() {
    bool may = true;
    for (Stream *s : streams)
      if (s->is_capturing && capture_mode != tp::CUDA_CAPTURE_RELAXED) {
        s->is_invalid = true;
        may = false;
      }
    return may;
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      Stream *found = nullptr;
      // The callers' streams first: what is ours to order is wrong then, unless it was ordered.
      if (budget != 0 && sticky == 0)
        for (Stream *s : streams)
          if (!s->is_busy && !s->queue.empty() && s->queue.front().is_ready() &&
              (found == nullptr || made_streams.count(found) != 0))
            found = s;
      is_idle = found == nullptr;
      if (found == nullptr) {
        changed.notify_all();
        changed.wait(lock);
        continue;
      }
      Operation next = std::move(found->queue.front());
      found->queue.pop_front();
      found->is_busy = true;
      lock.unlock();
      next.act();
      lock.lock();
      found->is_busy = false;
      budget -= budget > 0;
      changed.notify_all();
    }
  }

  void add(
      Stream *stream, std::function<void()> act,
      std::function<bool()> is_ready = [] { return true; }) {
    if (stream->is_capturing)
      stream->captured.push_back({std::move(is_ready), std::move(act)});
    else
      stream->queue.push_back({std::move(is_ready), std::move(act)});
    changed.notify_all();
  }

  Stream *stream_of(void *handle) {
    static auto *by_default = new Stream;
    auto *stream = handle == nullptr ? by_default : static_cast<Stream *>(handle);
    streams.insert(stream);
    return stream;
  }
};

Fake &fake() {
  static Fake *made = [] {
    auto *f = new Fake;
    f->thread = std::thread([f] { f->run(); });
    f->thread.detach();
    return f;
  }();
  return *made;
}

Memory make_memory(size_t bytes) {
  const int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    return {nullptr, 0, -1};
  void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return {at, bytes, fd};
}

void drop(const Memory &m) {
  munmap(m.at, m.bytes);
  close(m.fd);
}

struct Handle {
  int pid, fd;
  size_t bytes;
};

tp::CudaIpcHandle handle_of(const Memory &m) {
  tp::CudaIpcHandle handle{};
  const Handle about{getpid(), m.fd, m.bytes};
  std::memcpy(handle.bytes, &about, sizeof(about));
  return handle;
}

int open_handle(const tp::CudaIpcHandle &handle, Memory &to) {
  Handle about;
  std::memcpy(&about, handle.bytes, sizeof(about));
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", about.pid, about.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0)
    return INVALID_HANDLE;
  void *at = mmap(nullptr, about.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  to = {at, about.bytes, fd};
  return at == MAP_FAILED ? INVALID_HANDLE : tp::CUDA_OK;
}

// What every call begins with.
#define ENTER(name)                                                                                \
  Fake &f = fake();                                                                                \
  const std::lock_guard lock(f.mutex);                                                             \
  if (const int code = f.enter(name); code != tp::CUDA_OK)                                         \
  return code
// ... that needs a context.
#define ENTER_CONTEXT(name)                                                                        \
  ENTER(name);                                                                                     \
  if (f.current == 0)                                                                              \
  return INVALID_CONTEXT
// ... and that CUDA calls unsafe during a capture.
#define ENTER_UNSAFE(name)                                                                         \
  ENTER_CONTEXT(name);                                                                             \
  if (!f.may_be_unsafe())                                                                          \
  return CAPTURE_UNSUPPORTED

} // namespace

// ---------------------------------------------------------------- the driver

EXPORT int cuInit(unsigned) {
  ENTER("cuInit");
  return tp::CUDA_OK;
}
EXPORT int cuDriverGetVersion(int *version) {
  ENTER("cuDriverGetVersion");
  *version = 13000;
  return tp::CUDA_OK;
}
EXPORT int cuGetErrorName(int, const char **name) {
  *name = "FAKE_ERROR";
  return tp::CUDA_OK;
}
EXPORT int cuDeviceGetCount(int *count) {
  ENTER("cuDeviceGetCount");
  *count = f.count;
  return tp::CUDA_OK;
}
EXPORT int cuDeviceGet(int *device, int ordinal) {
  ENTER("cuDeviceGet");
  *device = ordinal;
  return ordinal < f.count ? tp::CUDA_OK : INVALID_VALUE;
}
EXPORT int cuDeviceGetName(char *name, int length, int) {
  ENTER("cuDeviceGetName");
  std::snprintf(name, static_cast<size_t>(length), "fake device");
  return tp::CUDA_OK;
}
EXPORT int cuDeviceGetUuid_v2(tp::CudaUuid *uuid, int device) {
  ENTER("cuDeviceGetUuid");
  std::memcpy(uuid->bytes, f.uuid, sizeof(f.uuid));
  uuid->bytes[15] = static_cast<char>(device);
  return tp::CUDA_OK;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int) {
  ENTER("cuDevicePrimaryCtxRetain");
  ++f.contexts;
  *context = &f;
  return tp::CUDA_OK;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int) {
  ENTER("cuDevicePrimaryCtxRelease");
  --f.contexts;
  return tp::CUDA_OK;
}
EXPORT int cuCtxPushCurrent_v2(void *) {
  ENTER("cuCtxPushCurrent");
  ++f.current;
  return tp::CUDA_OK;
}
EXPORT int cuCtxPopCurrent_v2(void **) {
  ENTER("cuCtxPopCurrent");
  --f.current;
  return tp::CUDA_OK;
}
EXPORT int cuModuleLoadData(void **module, const void *) {
  ENTER_UNSAFE("cuModuleLoadData");
  ++f.modules;
  *module = &f.modules;
  return tp::CUDA_OK;
}
EXPORT int cuModuleUnload(void *) {
  ENTER_UNSAFE("cuModuleUnload");
  --f.modules;
  return tp::CUDA_OK;
}
EXPORT int cuModuleGetFunction(void **function, void *, const char *name) {
  ENTER_CONTEXT("cuModuleGetFunction");
  *function = &f;
  return std::strcmp(name, "tp_pack") == 0 ? tp::CUDA_OK : INVALID_VALUE;
}
EXPORT int cuLaunchKernel(void *, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                          unsigned, unsigned, void *stream, void **parameters, void **) {
  ENTER_CONTEXT("cuLaunchKernel");
  const auto args = *static_cast<tp::PackArguments *>(parameters[0]);
  if (threads != tp::PACK_THREADS || blocks != tp::pack_blocks(args.num_rows))
    return INVALID_VALUE;
  f.add(f.stream_of(stream), [args, &f] { tp::pack_on_cpu(args, f.seed); });
  return tp::CUDA_OK;
}
EXPORT int cuMemAlloc_v2(tp::CudaPointer *to, size_t bytes) {
  ENTER_UNSAFE("cuMemAlloc");
  const Memory m = make_memory(bytes);
  std::memset(m.at, 0xA5, bytes); // nobody may count on zeros
  *to = reinterpret_cast<uint64_t>(m.at);
  f.memory[*to] = m;
  return tp::CUDA_OK;
}
EXPORT int cuMemFree_v2(tp::CudaPointer at) {
  ENTER_UNSAFE("cuMemFree");
  const auto found = f.memory.find(at);
  if (found == f.memory.end())
    return INVALID_VALUE;
  drop(found->second);
  f.memory.erase(found);
  return tp::CUDA_OK;
}
EXPORT int cuMemHostAlloc(void **to, size_t bytes, unsigned flags) {
  ENTER_UNSAFE("cuMemHostAlloc");
  *to = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*to, 0xA5, bytes);
  f.host[*to] = bytes;
  return flags == (tp::CUDA_HOST_PORTABLE | tp::CUDA_HOST_MAPPED) ? tp::CUDA_OK : INVALID_VALUE;
}
EXPORT int cuMemFreeHost(void *at) {
  ENTER_UNSAFE("cuMemFreeHost");
  if (f.host.erase(at) == 0)
    return INVALID_VALUE;
  free(at);
  return tp::CUDA_OK;
}
EXPORT int cuMemHostRegister_v2(void *at, size_t bytes, unsigned) {
  ENTER_UNSAFE("cuMemHostRegister");
  if (reinterpret_cast<uint64_t>(at) % 4096 != 0 || bytes % 4096 != 0)
    return INVALID_VALUE;
  f.pinned[at] = bytes;
  return tp::CUDA_OK;
}
EXPORT int cuMemHostUnregister(void *at) {
  ENTER_UNSAFE("cuMemHostUnregister");
  return f.pinned.erase(at) == 1 ? tp::CUDA_OK : INVALID_VALUE;
}
EXPORT int cuMemHostGetDevicePointer_v2(tp::CudaPointer *to, void *at, unsigned) {
  ENTER_CONTEXT("cuMemHostGetDevicePointer");
  *to = reinterpret_cast<uint64_t>(at);
  return f.host.count(at) + f.pinned.count(at) == 1 ? tp::CUDA_OK : INVALID_VALUE;
}
EXPORT int cuMemcpyHtoDAsync_v2(tp::CudaPointer to, const void *from, size_t bytes, void *stream) {
  ENTER_CONTEXT("cuMemcpyHtoDAsync");
  if (!f.stream_of(stream)->is_idle())
    return INVALID_VALUE; // (nobody does)
  std::memcpy(reinterpret_cast<void *>(to), from,
              bytes); // held streams hold no copy of an idle one
  return tp::CUDA_OK;
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, tp::CudaPointer from, size_t bytes, void *stream) {
  ENTER_CONTEXT("cuMemcpyDtoHAsync");
  f.add(f.stream_of(stream), [=] { std::memcpy(to, reinterpret_cast<const void *>(from), bytes); });
  return tp::CUDA_OK;
}
EXPORT int cuStreamCreate(void **stream, unsigned) {
  ENTER_CONTEXT("cuStreamCreate");
  auto *made = new Stream;
  f.streams.insert(made);
  f.made_streams.insert(made);
  *stream = made;
  return tp::CUDA_OK;
}
EXPORT int cuStreamDestroy_v2(void *stream) {
  ENTER_CONTEXT("cuStreamDestroy");
  if (f.made_streams.erase(static_cast<Stream *>(stream)) == 0)
    return INVALID_HANDLE;
  f.streams.erase(static_cast<Stream *>(stream));
  delete static_cast<Stream *>(stream);
  return tp::CUDA_OK;
}
EXPORT int cuStreamQuery(void *stream) {
  ENTER_UNSAFE("cuStreamQuery");
  return f.stream_of(stream)->is_idle() ? tp::CUDA_OK : tp::CUDA_NOT_READY;
}
// When waiting fails, nothing runs there any more.
EXPORT int cuStreamSynchronize(void *stream) {
  Fake &f = fake();
  std::unique_lock lock(f.mutex);
  const Stream *s = f.stream_of(stream);
  if (!f.may_be_unsafe())
    return CAPTURE_UNSUPPORTED;
  f.changed.wait(lock, [&] { return s->is_idle() || f.sticky != 0; });
  return f.enter("cuStreamSynchronize");
}
EXPORT int cuCtxSynchronize() {
  Fake &f = fake();
  std::unique_lock lock(f.mutex);
  if (!f.may_be_unsafe())
    return CAPTURE_UNSUPPORTED;
  f.changed.wait(lock, [&] {
    return f.sticky != 0 ||
           std::all_of(f.streams.begin(), f.streams.end(), [](auto *s) { return s->is_idle(); });
  });
  return f.enter("cuCtxSynchronize");
}
EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned) {
  ENTER_CONTEXT("cuStreamWaitEvent");
  auto *e = static_cast<Event *>(event);
  const uint64_t awaited = e->counts()[0];
  f.add(f.stream_of(stream), [] {}, [=] { return e->counts()[1] >= awaited; });
  return tp::CUDA_OK;
}
EXPORT int cuStreamIsCapturing(void *stream, int *status) {
  ENTER_CONTEXT("cuStreamIsCapturing");
  *status = f.stream_of(stream)->is_capturing;
  return tp::CUDA_OK;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) { // (it has nothing to fail at)
  std::swap(*mode, capture_mode);
  return tp::CUDA_OK;
}
EXPORT int cuStreamWriteValue64_v2(void *stream, tp::CudaPointer at, uint64_t value, unsigned) {
  ENTER_CONTEXT("cuStreamWriteValue64");
  if (f.stream_of(stream)->is_capturing)
    return CAPTURE_UNSUPPORTED;
  f.add(f.stream_of(stream), [=] { reinterpret_cast<std::atomic<uint64_t> *>(at)->store(value); });
  return tp::CUDA_OK;
}
EXPORT int cuLaunchHostFunc(void *stream, tp::CudaHostFunction function, void *data) {
  ENTER_CONTEXT("cuLaunchHostFunc");
  f.add(f.stream_of(stream), [=] { function(data); });
  return tp::CUDA_OK;
}
EXPORT int cuEventCreate(void **event, unsigned) {
  ENTER_CONTEXT("cuEventCreate");
  auto *made = new Event{make_memory(4096), false};
  f.events.insert(made);
  *event = made;
  return tp::CUDA_OK;
}
EXPORT int cuEventDestroy_v2(void *event) {
  ENTER_CONTEXT("cuEventDestroy");
  auto *e = static_cast<Event *>(event);
  if (f.events.erase(e) == 0)
    return INVALID_HANDLE;
  drop(e->memory);
  delete e;
  return tp::CUDA_OK;
}
EXPORT int cuEventRecord(void *event, void *stream) {
  ENTER_CONTEXT("cuEventRecord");
  auto *e = static_cast<Event *>(event);
  const uint64_t number = ++e->counts()[0];
  f.add(f.stream_of(stream), [=] { e->counts()[1] = number; });
  return tp::CUDA_OK;
}
EXPORT int cuEventQuery(void *event) {
  ENTER_UNSAFE("cuEventQuery");
  const auto *e = static_cast<Event *>(event);
  return e->counts()[1] >= e->counts()[0] ? tp::CUDA_OK : tp::CUDA_NOT_READY;
}
EXPORT int cuIpcGetMemHandle(tp::CudaIpcHandle *handle, tp::CudaPointer at) {
  ENTER_CONTEXT("cuIpcGetMemHandle");
  *handle = handle_of(f.memory.at(at));
  return tp::CUDA_OK;
}
EXPORT int cuIpcOpenMemHandle_v2(tp::CudaPointer *to, tp::CudaIpcHandle handle, unsigned) {
  ENTER_UNSAFE("cuIpcOpenMemHandle");
  Memory m;
  if (const int code = open_handle(handle, m); code != tp::CUDA_OK)
    return code;
  *to = reinterpret_cast<uint64_t>(m.at);
  f.opened[*to] = m;
  return tp::CUDA_OK;
}
EXPORT int cuIpcCloseMemHandle(tp::CudaPointer at) {
  ENTER_UNSAFE("cuIpcCloseMemHandle");
  const auto found = f.opened.find(at);
  if (found == f.opened.end())
    return INVALID_VALUE;
  drop(found->second);
  f.opened.erase(found);
  return tp::CUDA_OK;
}
EXPORT int cuIpcGetEventHandle(tp::CudaIpcHandle *handle, void *event) {
  ENTER_CONTEXT("cuIpcGetEventHandle");
  *handle = handle_of(static_cast<Event *>(event)->memory);
  return tp::CUDA_OK;
}
EXPORT int cuIpcOpenEventHandle(void **event, tp::CudaIpcHandle handle) {
  ENTER_CONTEXT("cuIpcOpenEventHandle");
  Memory m;
  if (const int code = open_handle(handle, m); code != tp::CUDA_OK)
    return code;
  auto *made = new Event{m, true};
  f.events.insert(made);
  *event = made;
  return tp::CUDA_OK;
}

// ---------------------------------------------------------------- for the tests

// The nth coming call of `name` returns `code`; nth 0: none does.
EXPORT void fake_fail(const char *name, int nth, int code) {
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  f.failing = nth == 0 ? "" : name;
  f.fail_at = nth;
  f.fail_code = code;
}
// Every call returns `code`, and no stream goes on: a context after a fault of the GPU. 0: no more.
EXPORT void fake_break(int code) {
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  f.sticky = code;
  f.changed.notify_all();
}
// No stream goes on while held.
EXPORT void fake_hold(int is_held) {
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  f.budget = is_held ? 0 : -1;
  f.changed.notify_all();
}
// The next `count` operations run, then the streams are held again; waits for that.
EXPORT void fake_run(int count) {
  Fake &f = fake();
  std::unique_lock lock(f.mutex);
  f.budget = count;
  f.is_idle = false;
  f.changed.notify_all();
  f.changed.wait(lock, [&] { return f.budget == 0 || f.is_idle; });
  f.budget = 0;
}
EXPORT void fake_set_order(uint32_t seed) { fake().seed = seed; }
EXPORT void fake_set_devices(int count) { fake().count = count; }
EXPORT void fake_set_uuid(const char *uuid) { std::memcpy(fake().uuid, uuid, 15); }
EXPORT void *fake_stream() {
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  return f.stream_of(new Stream);
}
EXPORT void fake_begin_capture(void *stream) {
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  f.stream_of(stream)->is_capturing = true;
  f.stream_of(stream)->is_invalid = false;
  f.stream_of(stream)->captured.clear();
}
// Whether the capture is good.
EXPORT int fake_end_capture(void *stream) {
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  f.stream_of(stream)->is_capturing = false;
  return !f.stream_of(stream)->is_invalid;
}
// Launches once more what was captured in `stream`.
EXPORT void fake_replay(void *stream) {
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  Stream *s = f.stream_of(stream);
  for (const Operation &operation : s->captured)
    s->queue.push_back(operation);
  f.changed.notify_all();
}
// How much is held: contexts, modules, streams, memory, memory of the host, events, handles of
// others.
EXPORT int fake_held() {
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  return f.contexts + f.modules + f.current +
         static_cast<int>(f.memory.size() + f.host.size() + f.pinned.size() + f.events.size() +
                          f.opened.size() + f.made_streams.size());
}
// Forgets what is held. The memory stays, in case that somebody uses it after all.
EXPORT void fake_forget() {
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  f.contexts = f.modules = f.current = 0;
  f.memory.clear();
  f.host.clear();
  f.pinned.clear();
  f.events.clear();
  f.opened.clear();
  f.made_streams.clear();
}
// The calls so far, one a line; forgets them.
EXPORT const char *fake_log() {
  static auto *text = new std::string;
  Fake &f = fake();
  const std::lock_guard lock(f.mutex);
  text->clear();
  for (const std::string &name : f.log)
    *text += name + "\n";
  f.log.clear();
  return text->c_str();
}
