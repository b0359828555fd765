// paddle_device.cpp: a device of Paddle's on a machine without one, as its plugin: memory of this
// process, and streams whose copies to the CPU happen when somebody waits for the stream. Who reads
// such a copy before finds what was there. test_ops.py loads it; Paddle knows it as "late".
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace {

struct Late {
  C_Stream stream;
  std::function<void()> copy;
};
std::mutex mutex;
std::vector<Late> due;
int blocking_copies = 0;

C_Status done() { return C_SUCCESS; }
C_Status done_for(C_Device) { return C_SUCCESS; }

C_Status wait_for(C_Device, C_Stream stream) {
  const std::lock_guard lock(mutex);
  for (Late &late : due)
    if (late.stream == stream && late.copy) {
      late.copy();
      late.copy = nullptr;
    }
  return C_SUCCESS;
}

C_Status copy(C_Device, void *to, const void *from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return C_SUCCESS;
}
C_Status copy_down(C_Device device, void *to, const void *from, size_t bytes) {
  ++blocking_copies;
  return copy(device, to, from, bytes);
}
C_Status copy_in(C_Device device, C_Stream, void *to, const void *from, size_t bytes) {
  return copy(device, to, from, bytes);
}
C_Status copy_down_in(C_Device, C_Stream stream, void *to, const void *from, size_t bytes) {
  const std::lock_guard lock(mutex);
  std::memset(to, 0x55, bytes);
  due.push_back({stream, [=] { std::memcpy(to, from, bytes); }});
  return C_SUCCESS;
}
C_Status allocate(C_Device, void **at, size_t bytes) {
  *at = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *at == nullptr ? C_FAILED : C_SUCCESS;
}
C_Status deallocate(C_Device, void *at, size_t) {
  std::free(at);
  return C_SUCCESS;
}

} // namespace

// How often a copy to the CPU did not go through a stream.
extern "C" int late_blocking_copies() { return blocking_copies; }

extern "C" void InitPlugin(CustomRuntimeParams *params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char *>("late");
  params->sub_device_type = const_cast<char *>("late");
  C_DeviceInterface &to = *params->interface;
  std::memset(static_cast<void *>(&to), 0, sizeof(to));
  to.size = sizeof(to);
  to.initialize = done;
  to.finalize = done;
  to.init_device = done_for;
  to.set_device = done_for;
  to.get_device = [](C_Device device) {
    device->id = 0;
    return C_SUCCESS;
  };
  to.deinit_device = done_for;
  to.create_stream = [](C_Device, C_Stream *stream) {
    *stream = reinterpret_cast<C_Stream>(new char);
    return C_SUCCESS;
  };
  to.destroy_stream = [](C_Device, C_Stream) { return C_SUCCESS; };
  to.create_event = [](C_Device, C_Event *event) {
    *event = reinterpret_cast<C_Event>(new char);
    return C_SUCCESS;
  };
  to.destroy_event = [](C_Device, C_Event) { return C_SUCCESS; };
  to.record_event = [](C_Device, C_Stream, C_Event) { return C_SUCCESS; };
  to.synchronize_device = done_for;
  to.synchronize_stream = wait_for;
  to.synchronize_event = [](C_Device, C_Event) { return C_SUCCESS; };
  to.stream_wait_event = [](C_Device, C_Stream, C_Event) { return C_SUCCESS; };
  to.device_memory_allocate = allocate;
  to.host_memory_allocate = allocate;
  to.device_memory_deallocate = deallocate;
  to.host_memory_deallocate = deallocate;
  to.memory_copy_h2d = copy;
  to.memory_copy_d2d = copy;
  to.memory_copy_d2h = copy_down;
  to.async_memory_copy_h2d = copy_in;
  to.async_memory_copy_d2d = copy_in;
  to.async_memory_copy_d2h = copy_down_in;
  to.get_device_count = [](size_t *count) {
    *count = 1;
    return C_SUCCESS;
  };
  to.get_device_list = [](size_t *list) {
    list[0] = 0;
    return C_SUCCESS;
  };
  to.device_memory_stats = [](C_Device, size_t *total, size_t *free) {
    *total = *free = size_t{1} << 30;
    return C_SUCCESS;
  };
  const auto chunk = [](C_Device, size_t *bytes) {
    *bytes = 4096;
    return C_SUCCESS;
  };
  to.device_min_chunk_size = chunk;
  to.device_max_chunk_size = [](C_Device, size_t *bytes) {
    *bytes = size_t{1} << 24;
    return C_SUCCESS;
  };
}
