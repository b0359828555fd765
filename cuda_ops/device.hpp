// device.hpp: one GPU as one party uses it: what it has created there is released in reverse order,
// whatever goes wrong.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "driver.hpp"

namespace tp {

// Design: the device's primary context is the one that PyTorch and Paddle use, too. It is current
// only while a Current lives, so that the caller's own context is never changed. Meanwhile this
// thread's calls may be any, although somebody captures a graph: with the mode that PyTorch
// captures in, an allocation or a query of ours, of whatever thread, would be refused and end the
// capture.
class Device {
public:
  Device(const Driver &driver, int ordinal) : driver_(driver) {
    driver.check("cuInit", driver.cuInit(0));
    driver.check("cuDeviceGet", driver.cuDeviceGet(&device_, ordinal));
    driver.check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(&context_, device_));
  }
  ~Device() { (void)release(); }
  Device(const Device &) = delete;
  Device &operator=(const Device &) = delete;

  class Current {
  public:
    Current(const Driver &driver, void *context) : driver_(driver) {
      driver.check("cuCtxPushCurrent", driver.cuCtxPushCurrent_v2(context));
      driver.cuThreadExchangeStreamCaptureMode(&capture_mode_);
    }
    ~Current() {
      void *ignored;
      driver_.cuThreadExchangeStreamCaptureMode(&capture_mode_);
      driver_.cuCtxPopCurrent_v2(&ignored);
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;

  private:
    const Driver &driver_;
    int capture_mode_ = CUDA_CAPTURE_RELAXED; // then the caller's
  };
  [[nodiscard]] Current current() const { return {driver_, context_}; }

  [[nodiscard]] CudaUuid uuid() const {
    CudaUuid uuid{};
    driver_.check("cuDeviceGetUuid", driver_.cuDeviceGetUuid_v2(&uuid, device_));
    return uuid;
  }

  // All below: with the context current.
  [[nodiscard]] CudaPointer allocate(size_t bytes) {
    CudaPointer made = 0;
    driver_.check("cuMemAlloc", driver_.cuMemAlloc_v2(&made, bytes));
    undo_.push_back([this, made] { return driver_.cuMemFree_v2(made); });
    return made;
  }
  // Memory of the host that the device can read and write.
  [[nodiscard]] uint8_t *allocate_host(size_t bytes) {
    void *made = nullptr;
    driver_.check("cuMemHostAlloc",
                  driver_.cuMemHostAlloc(&made, bytes, CUDA_HOST_PORTABLE | CUDA_HOST_MAPPED));
    undo_.push_back([this, made] { return driver_.cuMemFreeHost(made); });
    return static_cast<uint8_t *>(made);
  }
  // Makes memory of the host that exists already such memory.
  void pin(void *at, size_t bytes) {
    driver_.check("cuMemHostRegister",
                  driver_.cuMemHostRegister_v2(at, bytes, CUDA_HOST_PORTABLE | CUDA_HOST_MAPPED));
    undo_.push_back([this, at] { return driver_.cuMemHostUnregister(at); });
  }
  [[nodiscard]] CudaPointer address_of(void *host) const {
    CudaPointer found = 0;
    driver_.check("cuMemHostGetDevicePointer",
                  driver_.cuMemHostGetDevicePointer_v2(&found, host, 0));
    return found;
  }
  [[nodiscard]] CudaStream make_stream() {
    CudaStream made = nullptr;
    driver_.check("cuStreamCreate", driver_.cuStreamCreate(&made, CUDA_STREAM_NON_BLOCKING));
    undo_.push_back([this, made] { return driver_.cuStreamDestroy_v2(made); });
    return made;
  }
  [[nodiscard]] CudaEvent make_event(unsigned more = 0) {
    CudaEvent made = nullptr;
    driver_.check("cuEventCreate", driver_.cuEventCreate(&made, CUDA_EVENT_DISABLE_TIMING | more));
    undo_.push_back([this, made] { return driver_.cuEventDestroy_v2(made); });
    return made;
  }
  [[nodiscard]] void *load(const std::string &image, const char *function) {
    void *module = nullptr, *found = nullptr;
    driver_.check("cuModuleLoadData", driver_.cuModuleLoadData(&module, image.data()));
    undo_.push_back([this, module] { return driver_.cuModuleUnload(module); });
    driver_.check("cuModuleGetFunction", driver_.cuModuleGetFunction(&found, module, function));
    return found;
  }
  [[nodiscard]] CudaPointer open_memory(const CudaIpcHandle &handle) {
    CudaPointer opened = 0;
    driver_.check("cuIpcOpenMemHandle",
                  driver_.cuIpcOpenMemHandle_v2(&opened, handle, CUDA_IPC_LAZY_PEER_ACCESS));
    undo_.push_back([this, opened] { return driver_.cuIpcCloseMemHandle(opened); });
    return opened;
  }
  [[nodiscard]] CudaEvent open_event(const CudaIpcHandle &handle) {
    CudaEvent opened = nullptr;
    driver_.check("cuIpcOpenEventHandle", driver_.cuIpcOpenEventHandle(&opened, handle));
    undo_.push_back([this, opened] { return driver_.cuEventDestroy_v2(opened); });
    return opened;
  }

  // Releases everything, last first, and goes on when a call fails; returns the first code that is
  // not success.
  [[nodiscard]] int release() noexcept {
    if (context_ == nullptr)
      return CUDA_OK;
    int first = driver_.cuCtxPushCurrent_v2(context_), capture_mode = CUDA_CAPTURE_RELAXED;
    driver_.cuThreadExchangeStreamCaptureMode(&capture_mode);
    for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo)
      keep_first(first, (*undo)());
    undo_.clear();
    void *ignored;
    driver_.cuThreadExchangeStreamCaptureMode(&capture_mode);
    keep_first(first, driver_.cuCtxPopCurrent_v2(&ignored));
    keep_first(first, driver_.cuDevicePrimaryCtxRelease_v2(device_));
    context_ = nullptr;
    return first;
  }

private:
  static void keep_first(int &first, int code) noexcept { first = first == CUDA_OK ? code : first; }

  const Driver &driver_;
  int device_ = 0;
  void *context_ = nullptr;
  std::vector<std::function<int()>> undo_;
};

} // namespace tp
