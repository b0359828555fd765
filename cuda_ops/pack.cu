// pack.cu: the pack kernel; its body is pack.hpp.
#include "pack.hpp"

extern "C" __global__ void __launch_bounds__(tp::PACK_THREADS)
    tp_pack(const __grid_constant__ tp::PackArguments arguments) {
  __shared__ alignas(16) unsigned char room[sizeof(tp::PackShared)];
  auto &shared = *reinterpret_cast<tp::PackShared *>(room);
  tp::PackThread thread(arguments, shared, blockIdx.x, gridDim.x, threadIdx.x);
  tp::pack_block(arguments, [&thread](auto phase, auto... more) {
    (thread.*phase)(more...);
    __syncthreads();
  });
}
