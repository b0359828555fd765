// cuda_reader.hpp: the reader's end of the source cuda-ipc. A step's head is in the source segment;
// its body lies in a ring on the engine's GPU, which is opened here and copied straight into the
// claimed slot.
#pragma once

#include <optional>

#include "device.hpp"
#include "output_ops.hpp"
#include "segment_file.hpp"

namespace tp {

// Design: the ring is opened when the first step lies in it, and closed when its writer has
// withdrawn it, has a successor or is dead. Memory of a process that has died is not touched: what
// lay there is lost, and the slot says so.
class CudaReader {
public:
  // `source_fd`: the source segment's file, on which a living writer holds its lock.
  CudaReader(const Driver &driver, const SourceMap &source, const Core &core, int source_fd)
      : driver_(driver), source_(source), core_(core), source_fd_(source_fd) {
    driver.check("cuInit", driver.cuInit(0));
    detach(); // a predecessor that died has let go of what it had open
  }
  ~CudaReader() { detach(); }
  CudaReader(const CudaReader &) = delete;
  CudaReader &operator=(const CudaReader &) = delete;

  // Lets go of a ring that is not exported any more. Called now and then, also without a step.
  void look() noexcept {
    if (epoch_ != 0 && (exported_epoch() != epoch_ || !is_writer_alive()))
      detach();
  }

  // Copies the reader's oldest step into `slot`. Throws CudaError when its ring cannot be opened or
  // copied from although the writer lives; nothing is taken then.
  void get(SourceReader &reader, tp_step &slot) {
    const uint64_t sequence = reader.next();
    const uint32_t epoch = source_.slot(sequence).device_epoch;
    if (epoch == 0) {
      reader.get_any(slot);
      return;
    }
    reader.get_with(slot, [&](void *to, uint64_t bytes) {
      try {
        return epoch == exported_epoch() && is_writer_alive() && copy(sequence, epoch, to, bytes) &&
               is_writer_alive();
      } catch (const CudaError &) {
        if (is_writer_alive())
          throw;
        return false;
      }
    });
  }

private:
  [[nodiscard]] uint64_t exported_epoch() const noexcept {
    // SYNC POINT: exported ring - acquire: handles and sizes may be read
    return observe(source_.exported().epoch);
  }

  [[nodiscard]] bool is_writer_alive() const noexcept {
    return is_locked(source_fd_, TP_LOCK_WRITER);
  }

  bool copy(uint64_t sequence, uint32_t epoch, void *to, uint64_t bytes) {
    if (epoch_ != epoch)
      attach(epoch);
    if (bytes == 0)
      return true;
    const uint64_t place = sequence & (source_.sizes.source_slots - 1);
    const auto current = device_->current();
    driver_.check("cuStreamWaitEvent", driver_.cuStreamWaitEvent(stream_, packed_[place], 0));
    driver_.check("cuMemcpyDtoHAsync",
                  driver_.cuMemcpyDtoHAsync_v2(
                      to, ring_ + place * source_.slot_size + sizeof(tp_step), bytes, stream_));
    driver_.check("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_));
    return true;
  }

  // Another process wrote what is opened here: it is copied, then checked, then used.
  void attach(uint32_t epoch) {
    detach();
    const tp_export ring = source_.exported();
    const auto check = [](const char *what, uint64_t found, uint64_t expected) {
      if (found != expected)
        throw CudaError("the engine's ring", 0,
                        "the engine's ring on its GPU has " + std::string(what) + " " +
                            std::to_string(found) + ", expected " + std::to_string(expected));
    };
    check("layout", ring.layout_version, TP_LAYOUT_VERSION);
    check("slots", ring.num_slots, source_.sizes.source_slots);
    check("slot bytes", ring.slot_bytes, source_.slot_size);
    check("bytes", ring.ring_bytes, source_.slot_size * source_.sizes.source_slots);
    device_.emplace(driver_, ordinal_of(ring.device_uuid));
    try {
      const auto current = device_->current();
      device_->pin(&core_.slot(0), core_.slot_size * core_.sizes.ring_slots);
      ring_ = device_->open_memory(handle_at(ring.memory));
      packed_.clear();
      for (uint32_t i = 0; i < ring.num_slots; ++i)
        packed_.push_back(device_->open_event(handle_at(source_.exported_event(i))));
      stream_ = device_->make_stream();
    } catch (const CudaError &) {
      device_.reset();
      throw;
    }
    epoch_ = epoch;
    publish(source_.exported().attached, uint64_t{epoch});
  }

  void detach() noexcept {
    device_.reset();
    epoch_ = 0;
    publish(source_.exported().attached, uint64_t{0});
  }

  [[nodiscard]] static CudaIpcHandle handle_at(const uint8_t *bytes) noexcept {
    CudaIpcHandle handle;
    std::memcpy(handle.bytes, bytes, sizeof(handle.bytes));
    return handle;
  }

  // The same GPU may have another number in this process.
  [[nodiscard]] int ordinal_of(const uint8_t (&uuid)[16]) const {
    int count = 0;
    driver_.check("cuDeviceGetCount", driver_.cuDeviceGetCount(&count));
    for (int i = 0; i < count; ++i) {
      int device = 0;
      CudaUuid found{};
      driver_.check("cuDeviceGet", driver_.cuDeviceGet(&device, i));
      driver_.check("cuDeviceGetUuid", driver_.cuDeviceGetUuid_v2(&found, device));
      if (std::memcmp(found.bytes, uuid, sizeof(uuid)) == 0)
        return i;
    }
    throw CudaError("the engine's ring", 0,
                    "the engine's ring lies on a GPU that this process does not see; give the "
                    "pipeline the same CUDA_VISIBLE_DEVICES as the engine");
  }

  const Driver &driver_;
  const SourceMap &source_;
  const Core &core_;
  const int source_fd_;
  uint64_t epoch_ = 0; // of the ring that is open; 0: none
  CudaPointer ring_ = 0;
  CudaStream stream_ = nullptr;
  std::vector<CudaEvent> packed_;
  std::optional<Device> device_;
};

} // namespace tp
