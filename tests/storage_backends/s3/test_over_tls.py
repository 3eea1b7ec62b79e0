"""What is tested over TCP, over TLS: faults behind its end, landings, files that are sent, all by `SecureWire`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import pytest

from tests.services.certificates import make_certificates
from tests.services.fault_proxy import FaultProxy
from tests.services.s3_server import Certificates, S3Server
from tests.services.tls_front import TlsFront
from tests.storage_backends.s3.test_faults import (  # noqa: F401
    test_a_connection_that_was_kept_too_long_is_replaced,
    test_a_cut_get_goes_on_where_it_stopped,
    test_a_failed_upload_is_aborted,
    test_a_kept_connection_that_the_server_closed_costs_no_retry,
    test_a_probe_whose_answer_was_lost_leaves_nothing,
    test_a_redirect_of_a_part_is_followed_by_the_sdk,
    test_an_error_in_the_middle_of_a_part_ends_the_upload,
    test_an_object_replaced_between_two_halves_of_a_read_is_refused,
    test_cancelled_in_the_middle_of_a_read,
    test_cancelled_in_the_middle_of_an_upload,
    test_complete_answers_200_with_an_error_inside,
    test_complete_whose_answer_was_lost_is_a_success,
    test_conditional_put_whose_answer_was_lost_is_our_own,
    test_faults_that_stay_end_in_their_own_error,
    test_get,
    test_put,
)
from tests.storage_backends.s3.test_files_sent import (  # noqa: F401
    path,
    test_a_file_that_changes_after_its_checksum_was_taken,
    test_a_store_that_wants_signed_payloads_gets_them_from_memory,
    test_sent_again,
    test_what_arrives,
)
from tests.storage_backends.s3.test_landing import (  # noqa: F401
    test_cancelled_in_the_middle_nothing_is_written_any_more,
    test_into_a_file,
    test_into_memory_the_checksum_is_taken_on_the_way,
    test_one_after_the_other,
    test_what_is_not_there,
    test_what_only_memory_can_take_is_left_to_it,
    test_what_the_file_does_not_take_is_an_error_of_the_file,
)

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("credentials", "trust")]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@dataclass
class Fronted(S3Server):
    """``behind``: the port that the server itself listens at."""

    behind: int = 0


@pytest.fixture(scope="module")
def seaweedfs(seaweedfs: S3Server, certificates: Certificates) -> Iterator[Fronted]:
    known = {one.name: getattr(seaweedfs, one.name) for one in fields(seaweedfs)}
    with TlsFront(seaweedfs.port, certificates) as front:
        known |= {"endpoint_url": front.endpoint_url, "port": front.port, "ca_bundle": certificates.authority}
        yield Fronted(**known, behind=seaweedfs.port)


@pytest.fixture
def trust(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))


@pytest.fixture
def proxy(
    seaweedfs: Fronted, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.behind) as made, TlsFront(made.port, certificates) as front:
        monkeypatch.setattr(FaultProxy, "endpoint_url", front.endpoint_url)
        yield made
