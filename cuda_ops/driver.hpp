// driver.hpp: the calls of the CUDA driver, in one table that is filled at run time. Nothing is
// linked and no header of CUDA is needed, so one build runs with and without a GPU. Tests load a
// library of the same names (tests/native/fake_cuda.cpp); driver_abi.cu compares with cuda.h.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tp {

using CudaPointer = unsigned long long; // an address in a device's memory
using CudaStream = void *;
using CudaEvent = void *;
using CudaHostFunction = void (*)(void *);
struct CudaIpcHandle { // of memory and of events alike
  char bytes[64];
};
struct CudaUuid {
  char bytes[16];
};

inline constexpr int CUDA_OK = 0, CUDA_NOT_READY = 600;
inline constexpr unsigned CUDA_STREAM_NON_BLOCKING = 1, CUDA_EVENT_DISABLE_TIMING = 2,
                          CUDA_EVENT_INTERPROCESS = 4, CUDA_HOST_PORTABLE = 1, CUDA_HOST_MAPPED = 2,
                          CUDA_IPC_LAZY_PEER_ACCESS = 1;
inline constexpr int CUDA_CAPTURE_RELAXED = 2;

// name as the library exports it, and the parameters.
#define TP_CUDA_CALLS(CALL)                                                                        \
  CALL(cuInit, (unsigned))                                                                         \
  CALL(cuDriverGetVersion, (int *))                                                                \
  CALL(cuGetErrorName, (int, const char **))                                                       \
  CALL(cuDeviceGetCount, (int *))                                                                  \
  CALL(cuDeviceGet, (int *, int))                                                                  \
  CALL(cuDeviceGetName, (char *, int, int))                                                        \
  CALL(cuDeviceGetUuid_v2, (CudaUuid *, int))                                                      \
  CALL(cuDevicePrimaryCtxRetain, (void **, int))                                                   \
  CALL(cuDevicePrimaryCtxRelease_v2, (int))                                                        \
  CALL(cuCtxPushCurrent_v2, (void *))                                                              \
  CALL(cuCtxPopCurrent_v2, (void **))                                                              \
  CALL(cuCtxSynchronize, (void))                                                                   \
  CALL(cuModuleLoadData, (void **, const void *))                                                  \
  CALL(cuModuleUnload, (void *))                                                                   \
  CALL(cuModuleGetFunction, (void **, void *, const char *))                                       \
  CALL(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,        \
                        unsigned, CudaStream, void **, void **))                                   \
  CALL(cuMemAlloc_v2, (CudaPointer *, size_t))                                                     \
  CALL(cuMemFree_v2, (CudaPointer))                                                                \
  CALL(cuMemHostAlloc, (void **, size_t, unsigned))                                                \
  CALL(cuMemFreeHost, (void *))                                                                    \
  CALL(cuMemHostRegister_v2, (void *, size_t, unsigned))                                           \
  CALL(cuMemHostUnregister, (void *))                                                              \
  CALL(cuMemHostGetDevicePointer_v2, (CudaPointer *, void *, unsigned))                            \
  CALL(cuMemcpyHtoDAsync_v2, (CudaPointer, const void *, size_t, CudaStream))                      \
  CALL(cuMemcpyDtoHAsync_v2, (void *, CudaPointer, size_t, CudaStream))                            \
  CALL(cuStreamCreate, (CudaStream *, unsigned))                                                   \
  CALL(cuStreamDestroy_v2, (CudaStream))                                                           \
  CALL(cuStreamQuery, (CudaStream))                                                                \
  CALL(cuStreamSynchronize, (CudaStream))                                                          \
  CALL(cuStreamWaitEvent, (CudaStream, CudaEvent, unsigned))                                       \
  CALL(cuStreamIsCapturing, (CudaStream, int *))                                                   \
  CALL(cuThreadExchangeStreamCaptureMode, (int *))                                                 \
  CALL(cuStreamWriteValue64_v2, (CudaStream, CudaPointer, uint64_t, unsigned))                     \
  CALL(cuLaunchHostFunc, (CudaStream, CudaHostFunction, void *))                                   \
  CALL(cuEventCreate, (CudaEvent *, unsigned))                                                     \
  CALL(cuEventDestroy_v2, (CudaEvent))                                                             \
  CALL(cuEventRecord, (CudaEvent, CudaStream))                                                     \
  CALL(cuEventQuery, (CudaEvent))                                                                  \
  CALL(cuIpcGetMemHandle, (CudaIpcHandle *, CudaPointer))                                          \
  CALL(cuIpcOpenMemHandle_v2, (CudaPointer *, CudaIpcHandle, unsigned))                            \
  CALL(cuIpcCloseMemHandle, (CudaPointer))                                                         \
  CALL(cuIpcGetEventHandle, (CudaIpcHandle *, CudaEvent))                                          \
  CALL(cuIpcOpenEventHandle, (CudaEvent *, CudaIpcHandle))

// A call of the driver failed. `call` is its name, `code` what it returned (0: it is not there).
class CudaError : public std::runtime_error {
public:
  CudaError(std::string call, int code, const std::string &text)
      : std::runtime_error(text), call(std::move(call)), code(code) {}
  std::string call;
  int code;
};

class Driver {
public:
  // Throws CudaError when the library or one of its calls is not there.
  explicit Driver(const std::string &library) {
    library_ = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr)
      throw CudaError("dlopen", 0, dlerror());
#define TP_RESOLVE(name, parameters) resolve(name, #name, library);
    TP_CUDA_CALLS(TP_RESOLVE)
#undef TP_RESOLVE
  }
  Driver(const Driver &) = delete;
  Driver &operator=(const Driver &) = delete;
  // The library stays loaded: the driver has threads and exit handlers of its own.

  // Throws unless `code` is success.
  void check(const char *call, int code) const {
    if (code != CUDA_OK)
      throw error(call, code);
  }
  [[nodiscard]] CudaError error(const char *call, int code) const {
    const char *name = nullptr;
    cuGetErrorName(code, &name);
    return {call, code,
            std::string(call) + " failed: " + (name ? name : "error") + " (" +
                std::to_string(code) + ")"};
  }

#define TP_DECLARE(name, parameters) int(*name) parameters = nullptr;
  TP_CUDA_CALLS(TP_DECLARE)
#undef TP_DECLARE

private:
  template <class Call> void resolve(Call *&call, const char *name, const std::string &library) {
    call = reinterpret_cast<Call *>(dlsym(library_, name));
    if (call == nullptr) {
      dlclose(library_);
      throw CudaError(name, 0,
                      library + " has no " + name + ": a driver of CUDA 12 or newer is needed");
    }
  }

  void *library_ = nullptr;
};

} // namespace tp
