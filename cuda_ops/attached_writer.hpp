// attached_writer.hpp: an engine's writer on the pipeline of some name, for callers without Python
// (tokenpipe_ops.h). What segment.py and writer.py do for EngineWriter, over the same Writer.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>

#include "first_tokens.hpp"
#include "segment_file.hpp"

namespace tp {

// The pipeline cannot be used, for the reason `code`, an errno.
class PipelineError : public std::runtime_error {
public:
  PipelineError(const std::string &what, int code) : std::runtime_error(what), code(code) {}
  const int code;
};

// Descriptors by which others see that this process lives. A forked copy closes its own: kept, they
// would let a dead engine look alive for as long as the copy runs.
class HeldFiles {
public:
  // False when there are too many.
  [[nodiscard]] static bool add(int fd) noexcept {
    static const bool will_hear_of_forks = pthread_atfork(nullptr, nullptr, close_all) == 0;
    return will_hear_of_forks && std::any_of(places_.begin(), places_.end(), [&](uint32_t &place) {
             return swap(place, 0, static_cast<uint32_t>(fd) + 1);
           });
  }
  static void remove(int fd) noexcept {
    for (uint32_t &place : places_)
      if (swap(place, static_cast<uint32_t>(fd) + 1, 0))
        return;
  }

private:
  static void close_all() noexcept {
    for (uint32_t &place : places_) {
      if (place != 0)
        close(static_cast<int>(place) - 1);
      place = 0;
    }
  }
  static inline std::array<uint32_t, 64> places_{};
};

// A source segment's file, mapped. A forked copy of it has the memory, but not the file: that is
// opened a second time for the locks, since a mapping, also in a fork, keeps what it was made of.
class SourceFile {
public:
  // Takes over the descriptor. Throws PipelineError.
  SourceFile(int fd, uint64_t bytes) : bytes_(bytes), pid_(getpid()) {
    base_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int code = errno;
    const std::string again = "/proc/self/fd/" + std::to_string(fd);
    fd_ = base_ == MAP_FAILED ? -1 : open(again.c_str(), O_RDWR | O_CLOEXEC);
    if (base_ != MAP_FAILED && fd_ < 0)
      code = errno;
    close(fd);
    if (fd_ >= 0 && HeldFiles::add(fd_))
      return;
    if (fd_ >= 0) {
      close(fd_);
      code = EMFILE;
    }
    if (base_ != MAP_FAILED)
      munmap(base_, bytes);
    throw PipelineError(
        "map " + std::to_string(bytes) + " bytes of shared memory: " + std::strerror(code), code);
  }
  ~SourceFile() {
    munmap(base_, bytes_);
    if (!is_mine())
      return; // its number may be another file's here
    HeldFiles::remove(fd_);
    close(fd_);
  }
  SourceFile(const SourceFile &) = delete;
  SourceFile &operator=(const SourceFile &) = delete;

  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] void *base() const noexcept { return base_; }
  [[nodiscard]] uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  [[nodiscard]] bool is_mine() const noexcept { return getpid() == pid_; }

private:
  const uint64_t bytes_;
  const pid_t pid_;
  void *base_;
  int fd_;
};

struct ControlEvent {
  uint32_t row, generation, bit;
};

// Design: one thread at a time is inside a call; a second one is refused, not made to wait. What
// the former writer of a dead engine saved is decoded, and its requests are ended, before a new one
// gets the pipeline.
class AttachedWriter {
public:
  // Waits for the pipeline, `timeout_s` at most. Throws PipelineError.
  AttachedWriter(const char *name, double timeout_s)
      : name_(checked(name)), deadline_ns_(now_ns() + as_ns(timeout_s)), timeout_s_(timeout_s),
        core_path_(path(".core")), file_(open_source()), map_(map()), writer_(lock()),
        last_seen_(map_.sizes.max_num_seqs, 0) {
    announce_writer(map_.head(), static_cast<uint32_t>(file_->pid()), start_time());
  }
  ~AttachedWriter() {
    if (file_->is_mine())
      announce_writer(map_.head(), 0, 0);
  }
  AttachedWriter(const AttachedWriter &) = delete;
  AttachedWriter &operator=(const AttachedWriter &) = delete;

  [[nodiscard]] const tp_sizes &sizes() const noexcept { return map_.sizes; }

  // Saves one step, waiting for room: `wait_s` at most, below 0 as long as the pipeline lives.
  // Throws OpArgumentError, PipelineError; nothing was saved then.
  void save(const SaveArguments &a, double wait_s) {
    const Turn turn(*this);
    check_rows(a, Writer::check(a, map_.sizes).n);
    wait_for_space(wait_s);
    writer_.save(a);
    for (size_t i = 0; i < rows_.size(); ++i)
      writer_.note(rows_[i], static_cast<uint32_t>(generations_[i]));
  }

  // Hands out what has been decided about rows, up to `room` events; the rest at the next call.
  template <class Act> void poll_control(uint64_t room, Act &&act) {
    const Turn turn(*this);
    writer_.poll([&](uint32_t row, uint32_t generation, uint32_t bits) {
      for (const uint32_t bit : {TP_CONTROL_ABORT, TP_CONTROL_PREEMPT, TP_CONTROL_FINISHED})
        if (bits & bit)
          events_.push_back({row, generation, bit});
    });
    for (; room != 0 && !events_.empty(); --room) {
      act(events_.front());
      events_.pop_front();
    }
  }

  // Any thread may call it at any time.
  void beat(bool busy) {
    check_mine();
    writer_.beat(busy);
  }

private:
  // One thread's time inside a call.
  class Turn {
  public:
    explicit Turn(AttachedWriter &writer) : writer_(writer) {
      writer.check_mine();
      if (!swap(writer.is_inside_, 0, 1))
        throw PipelineError(
            "writer of \"" + writer.name_ + "\": another thread is inside a call of it", EBUSY);
    }
    ~Turn() { publish(writer_.is_inside_, 0u); }
    Turn(const Turn &) = delete;
    Turn &operator=(const Turn &) = delete;

  private:
    AttachedWriter &writer_;
  };

  static constexpr uint64_t second = 1'000'000'000u, look_ns = second / 5, poll_ns = second / 200;
  // An owner whose coordinator and roles were all killed has a new one by then, or never.
  static constexpr uint64_t gone_after_ns = 10 * second;
  static constexpr uint64_t smallest_file = 512; // a creator that is at work has not sized it yet

  [[nodiscard]] static uint64_t as_ns(double seconds) noexcept {
    return seconds > 0 ? static_cast<uint64_t>(std::min(seconds, 1e9) * 1e9) : 0;
  }

  [[nodiscard]] static std::string in_seconds(double time) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g s", time);
    return text;
  }

  [[nodiscard]] static std::string checked(const char *name) {
    const std::string given = name ? name : "";
    const bool fits = !given.empty() && given.size() <= 64 &&
                      given.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                              "0123456789_.-") == std::string::npos;
    if (!fits)
      throw OpArgumentError("name", "no pipeline can be named \"" + given + "\"");
    return given;
  }

  [[nodiscard]] std::string path(const char *ending) const {
    return "/dev/shm/tokenpipe." + name_ + ending;
  }
  [[nodiscard]] PipelineError failed(const std::string &why, int code) const {
    return PipelineError("attach \"" + name_ + "\": " + why, code);
  }

  // Sleeps a little before another look. False when the time is up.
  [[nodiscard]] bool may_look_again() const noexcept {
    if (now_ns() >= deadline_ns_)
      return false;
    constexpr timespec pause{0, static_cast<long>(poll_ns)};
    nanosleep(&pause, nullptr);
    return true;
  }

  [[nodiscard]] std::unique_ptr<SourceFile> open_source() const {
    do {
      if (auto file = try_open(path(".source")))
        return file;
    } while (may_look_again());
    throw failed("no live pipeline of that name within " + in_seconds(timeout_s_), ENOENT);
  }

  // Nothing while there is no file, or none of a pipeline that lives.
  [[nodiscard]] std::unique_ptr<SourceFile> try_open(const std::string &path) const {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT)
      return nullptr;
    struct stat about = {};
    if (fd < 0 || fstat(fd, &about) != 0 || !S_ISREG(about.st_mode) || about.st_uid != geteuid()) {
      const std::string why = fd < 0 ? std::strerror(errno) : "it belongs to somebody else";
      if (fd >= 0)
        close(fd);
      throw failed(path + " is not a file of ours (" + why + ")", EACCES);
    }
    if (static_cast<uint64_t>(about.st_size) < smallest_file) {
      close(fd);
      return nullptr;
    }
    auto file = std::make_unique<SourceFile>(fd, static_cast<uint64_t>(about.st_size));
    const auto &head = *static_cast<const tp_source *>(file->base());
    const uint64_t version = observe(head.version);
    if (version != 0 && version != TP_LAYOUT_VERSION)
      throw failed("found layout " + std::to_string(version) + ", this build has layout " +
                       std::to_string(TP_LAYOUT_VERSION) + "; stop the old run",
                   EPROTO);
    if (version == 0 || !is_locked(file->fd(), TP_LOCK_COORDINATOR))
      return nullptr;
    return file;
  }

  [[nodiscard]] SourceMap map() const {
    try {
      return {file_->base(), source_sizes(file_->base(), file_->bytes())};
    } catch (const std::invalid_argument &e) {
      throw failed(e.what(), EPROTO);
    }
  }

  // Takes the writer's place; only who has it may read where the last one was.
  [[nodiscard]] const SourceMap &lock() const {
    const tp_source &head = map_.head();
    for (;;) {
      const uint32_t pid = observe(head.writer_pid);
      const bool is_held = is_locked(file_->fd(), TP_LOCK_WRITER);
      if (pid == 0 && !is_held && hold(file_->fd(), TP_LOCK_WRITER))
        return map_;
      if (pid != 0 && is_held)
        throw failed("pid " + std::to_string(pid) + " is its engine writer", EBUSY);
      if (may_look_again())
        continue;
      throw failed(pid == 0 ? "somebody else is attaching"
                            : "pid " + std::to_string(pid) + " was its engine writer: it died, " +
                                  "and its requests have not been ended yet",
                   EBUSY);
    }
  }

  // Of this process, in clock ticks since boot; 0: no /proc tells.
  [[nodiscard]] static uint64_t start_time() noexcept {
    std::FILE *file = std::fopen("/proc/self/stat", "r");
    if (file == nullptr)
      return 0;
    char text[1024];
    const size_t size = std::fread(text, 1, sizeof(text) - 1, file);
    std::fclose(file);
    text[size] = '\0';
    // The command name, in brackets, may hold anything; the fields behind it are plain.
    const char *at = std::strrchr(text, ')');
    for (int field = 2; at != nullptr && field < 22; ++field)
      at = std::strchr(at + 1, ' ');
    return at != nullptr ? std::strtoull(at, nullptr, 10) : 0;
  }

  void check_mine() const {
    if (!file_->is_mine())
      throw PipelineError(
          "this writer is a fork's copy of that of pid " + std::to_string(file_->pid()), EPERM);
  }

  // Reads which life of which row is where. Of a row that stands twice only the first token would
  // count.
  void check_rows(const SaveArguments &a, uint64_t n) {
    rows_.resize(n);
    generations_.resize(n);
    Writer::read_generations(a.generations, generations_.data(), n);
    if (a.rows.is_there())
      Writer::read_rows(a.rows, rows_.data(), n, map_.sizes);
    ++num_checked_;
    for (uint32_t i = 0; i < n; ++i) {
      if (!a.rows.is_there())
        rows_[i] = i;
      if (generations_[i] == 0)
        continue;
      if (last_seen_[rows_[i]] == num_checked_)
        throw OpArgumentError("rows", "rows holds " + std::to_string(rows_[i]) +
                                          " twice, must name each running row once");
      last_seen_[rows_[i]] = num_checked_;
    }
  }

  void wait_for_space(double wait_s) {
    if (!has_writer(map_.head().kind))
      throw PipelineError(
          "save to \"" + name_ + "\": its steps come from FastDeploy's queue or socket", ENOTSUP);
    const uint64_t begun = now_ns(), limit = wait_s < 0 ? UINT64_MAX : as_ns(wait_s);
    for (;;) {
      check_that_it_lives();
      const uint64_t waited = now_ns() - begun;
      const uint64_t left = limit - std::min(waited, limit);
      if (writer_.wait_for_space({spin_ns, std::min(left, look_ns)})) {
        alone_since_ns_ = 0;
        return;
      }
      look_for_others();
      if (now_ns() - begun >= limit)
        throw PipelineError("save to \"" + name_ + "\": its " +
                                std::to_string(map_.sizes.source_slots) +
                                " source slots stayed full for " + in_seconds(wait_s),
                            ETIMEDOUT);
    }
  }
  static constexpr uint64_t spin_ns = 1000;

  void check_that_it_lives() const {
    if (observe(map_.head().gone) != 0)
      throw gone("it has stopped");
  }
  [[nodiscard]] PipelineError gone(const char *why) const {
    return PipelineError("pipeline \"" + name_ + "\" is gone: " + why, EPIPE);
  }

  // The ring stays full: whether anybody is there who may read it, now or soon.
  void look_for_others() {
    if (is_locked(file_->fd(), TP_LOCK_COORDINATOR) || is_locked(file_->fd(), TP_LOCK_READER) ||
        is_core_locked(TP_LOCK_DECODER, map_.sizes.num_decoders)) {
      alone_since_ns_ = 0; // roles wait for a new coordinator, or end
      return;
    }
    const uint64_t now = now_ns();
    if (alone_since_ns_ == 0)
      alone_since_ns_ = now;
    if (now - alone_since_ns_ > patience_ns())
      throw gone("its coordinator has died");
  }

  // How long somebody may still bring back a pipeline that was killed with its roles: an owner that
  // lives, or who runs `tokenpipe serve`.
  [[nodiscard]] uint64_t patience_ns() const noexcept {
    const tp_source &head = map_.head();
    if (observe(head.owned) == 0)
      return get(head.grace_ns);
    return is_core_locked(TP_LOCK_CLIENT, 1) ? gone_after_ns : 0;
  }

  [[nodiscard]] bool is_core_locked(uint32_t first, uint32_t count) const noexcept {
    const int fd = open(core_path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
      return false; // its creator is gone and has removed it
    const bool is_held = is_locked(fd, first, count);
    close(fd);
    return is_held;
  }

  const std::string name_;
  const uint64_t deadline_ns_;
  const double timeout_s_;
  const std::string core_path_;
  const std::unique_ptr<SourceFile> file_;
  const SourceMap map_;
  Writer writer_;
  uint32_t is_inside_ = 0; // 1 while a thread is
  uint64_t alone_since_ns_ = 0;
  std::deque<ControlEvent> events_; // decided, and not handed out yet
  std::vector<uint32_t> rows_;      // of the step in hand, as generations_
  std::vector<int32_t> generations_;
  std::vector<uint64_t> last_seen_; // by row: the last step that had it
  uint64_t num_checked_ = 0;
};

} // namespace tp
