// segment_file.hpp: what a segment's file must be before anything of it is used, and who holds it.
// Who lives is told by a lock on his byte of the file, which the kernel releases at his death.
#pragma once

#include <fcntl.h>

#include <stdexcept>

#include "atomics.hpp"
#include "plan.hpp"

namespace tp {

// Whether another open file holds one of the `count` locks from `first` on.
[[nodiscard]] inline bool is_locked(int fd, uint32_t first, uint32_t count = 1) noexcept {
  struct flock about = {};
  about.l_type = F_WRLCK;
  about.l_whence = SEEK_SET;
  about.l_start = first;
  about.l_len = count;
  return fcntl(fd, F_OFD_GETLK, &about) == 0 && about.l_type != F_UNLCK;
}

// Takes one for this open file, until its last descriptor is closed. False: another has it.
[[nodiscard]] inline bool hold(int fd, uint32_t byte) noexcept {
  struct flock about = {};
  about.l_type = F_WRLCK;
  about.l_whence = SEEK_SET;
  about.l_start = byte;
  about.l_len = 1;
  return fcntl(fd, F_OFD_SETLK, &about) == 0;
}

[[nodiscard]] inline bool sizes_work(const tp_sizes &s) noexcept {
  const auto power = [](uint32_t n) { return n >= 2 && (n & (n - 1)) == 0; };
  return s.max_num_seqs >= 1 && s.max_draft_tokens >= 1 &&
         s.max_draft_tokens <= TP_MAX_DRAFT_TOKENS && s.num_decoders >= 1 &&
         s.num_decoders <= TP_MAX_DECODERS && s.num_decoders <= s.max_num_seqs &&
         power(s.ring_slots) && power(s.output_slots) && power(s.source_slots) &&
         s.command_slots >= 1 && s.max_request_id_bytes % 8 == 0;
}

// The sizes that a mapped segment says it has. Another process wrote the header: nothing of it is
// used before it makes sense as a whole. Throws std::invalid_argument.
template <class Head, class Plan>
[[nodiscard]] tp_sizes sizes_in(const void *base, uint64_t bytes, uint64_t magic,
                                const char *which) {
  if (bytes < sizeof(Head))
    throw std::invalid_argument("the segment is smaller than its header");
  const auto &head = *static_cast<const Head *>(base);
  // SYNC POINT: segment ready - acquire: sizes and parts are written
  if (observe(head.version) != TP_LAYOUT_VERSION || head.magic != magic)
    throw std::invalid_argument(std::string("not a ") + which + " segment of this layout version");
  const tp_sizes sizes = head.sizes;
  if (!sizes_work(sizes) || Plan(sizes).end != bytes)
    throw std::invalid_argument("the header's sizes do not give the segment's size");
  return sizes;
}
[[nodiscard]] inline tp_sizes core_sizes(const void *base, uint64_t bytes) {
  return sizes_in<tp_header, CorePlan>(base, bytes, TP_CORE_MAGIC, "core");
}
[[nodiscard]] inline tp_sizes source_sizes(const void *base, uint64_t bytes) {
  return sizes_in<tp_source, SourcePlan>(base, bytes, TP_SOURCE_MAGIC, "source");
}

} // namespace tp
