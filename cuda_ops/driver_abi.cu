// driver_abi.cu: compiles only if the table of driver.hpp has the parameters that cuda.h declares.
// It is no part of any build; a test compiles it where nvcc is.
#include <cuda.h>

#include <type_traits>

#include "driver.hpp"

namespace {

// The table calls every handle a pointer and every enumeration an int.
template <class Ours, class Theirs> constexpr bool passes_alike() {
  if constexpr (std::is_class_v<Ours>)
    return std::is_class_v<Theirs> && sizeof(Ours) == sizeof(Theirs);
  else if constexpr (std::is_pointer_v<Ours>)
    return std::is_pointer_v<Theirs>;
  else
    return (std::is_integral_v<Theirs> || std::is_enum_v<Theirs>) && sizeof(Ours) == sizeof(Theirs);
}

template <class Ours, class Theirs> constexpr bool is_the_same = false;
template <class... Ours, class... Theirs>
constexpr bool is_the_same<int (*)(Ours...), CUresult(Theirs...)> = [] {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs))
    return (passes_alike<Ours, Theirs>() && ...);
  else
    return false;
}();

#define TP_COMPARE(name, parameters)                                                               \
  static_assert(is_the_same<decltype(tp::Driver::name), decltype(::name)>, #name " differs");
TP_CUDA_CALLS(TP_COMPARE)

static_assert(tp::CUDA_OK == CUDA_SUCCESS && tp::CUDA_NOT_READY == CUDA_ERROR_NOT_READY);
static_assert(tp::CUDA_STREAM_NON_BLOCKING == CU_STREAM_NON_BLOCKING);
static_assert(tp::CUDA_EVENT_DISABLE_TIMING == CU_EVENT_DISABLE_TIMING);
static_assert(tp::CUDA_EVENT_INTERPROCESS == CU_EVENT_INTERPROCESS);
static_assert(tp::CUDA_HOST_PORTABLE == CU_MEMHOSTREGISTER_PORTABLE &&
              tp::CUDA_HOST_PORTABLE == CU_MEMHOSTALLOC_PORTABLE);
static_assert(tp::CUDA_HOST_MAPPED == CU_MEMHOSTREGISTER_DEVICEMAP &&
              tp::CUDA_HOST_MAPPED == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(tp::CUDA_IPC_LAZY_PEER_ACCESS == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(tp::CUDA_CAPTURE_RELAXED == CU_STREAM_CAPTURE_MODE_RELAXED);

} // namespace
